; A builtin function of Python that does a call again which was made before, if nothing has changed that matters to it;
; `native/replay.py` makes it, and has the words of its table. Needs clock.ll, words.ll, additions.ll and checks.ll.

declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare i64 @PyThread_get_thread_ident()
declare ptr @PyIter_Next(ptr)
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyLong_FromLong(i64)

; Calls an object without arguments, if there is one, and drops what it gives.
define internal void @tell(ptr %function) {
entry:
  %none = icmp eq ptr %function, null
  br i1 %none, label %end, label %some
some:
  %given = call ptr @PyObject_CallNoArgs(ptr %function)
  call void @drop(ptr %given)
  br label %end
end:
  ret void
}

; Whether the attribute of each argument is what its weak reference refers to.
define internal i1 @same_arguments(ptr %t, ptr %args) {
entry:
  %count = call i64 @word(ptr %t, i64 $ARGUMENT_COUNT)
  %refs = call ptr @field(ptr %t, i64 $ARGUMENTS)
  %name = call ptr @field(ptr %t, i64 $NAME)
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i1, %same]
  %some = icmp slt i64 %i, %count
  br i1 %some, label %look, label %yes
look:
  %p = getelementptr ptr, ptr %args, i64 %i
  %arg = load ptr, ptr %p
  %value = call ptr @PyObject_GetAttr(ptr %arg, ptr %name)
  call void @drop(ptr %value)
  %ref = call ptr @field(ptr %refs, i64 %i)
  %seen = call ptr @PyObject_CallNoArgs(ptr %ref)
  call void @drop(ptr %seen)
  %is_null = icmp eq ptr %value, null
  %differs = icmp ne ptr %value, %seen
  %other = or i1 %is_null, %differs
  br i1 %other, label %no, label %same
same:
  %i1 = add i64 %i, 1
  br label %loop
yes:
  ret i1 1
no:
  ret i1 0
}

; Whether the last key of a dict is the number $MARK.
define internal i1 @marked(ptr %t) {
entry:
  %reversed = call ptr @field(ptr %t, i64 $REVERSED)
  %keys = call ptr @PyObject_CallNoArgs(ptr %reversed)
  %failed = icmp eq ptr %keys, null
  br i1 %failed, label %no, label %look
look:
  %key = call ptr @PyIter_Next(ptr %keys)
  call void @drop(ptr %keys)
  %none = icmp eq ptr %key, null
  br i1 %none, label %no, label %compare
compare:
  %found = call ptr @PyLong_AsVoidPtr(ptr %key)
  call void @drop(ptr %key)
  %mark = call ptr @field(ptr %t, i64 $MARK)
  %r = icmp eq ptr %found, %mark
  ret i1 %r
no:
  ret i1 0
}

; Whether all rows of the checks read what they read before; $CHANGED is the number of the first that does not.
define internal i1 @unchanged(ptr %t) {
  %rows = call ptr @field(ptr %t, i64 $CHECKS)
  %count = call i64 @word(ptr %t, i64 $CHECK_COUNT)
  %found = call i64 @first_change(ptr %rows, i64 %count)
  call void @put(ptr %t, i64 $CHANGED, i64 %found)
  %r = icmp eq i64 %found, %count
  ret i1 %r
}

; Whether this is the thread, and still the time, that the call was prepared for.
define internal i1 @in_time(ptr %t) {
  %me = call i64 @PyThread_get_thread_ident()
  %whose = call i64 @word(ptr %t, i64 $THREAD)
  %mine = icmp eq i64 %me, %whose
  %now = call i64 @nanoseconds()
  %until = call i64 @word(ptr %t, i64 $UNTIL)
  %early = icmp slt i64 %now, %until
  %r = and i1 %mine, %early
  ret i1 %r
}

define internal i1 @may(ptr %t, ptr %args, i64 %count) {
entry:
  %wanted = call i64 @word(ptr %t, i64 $ARGUMENT_COUNT)
  %fits = icmp eq i64 %count, %wanted
  br i1 %fits, label %arguments, label %no
arguments:
  %same = call i1 @same_arguments(ptr %t, ptr %args)
  br i1 %same, label %time, label %no
time:
  %early = call i1 @in_time(ptr %t)
  br i1 %early, label %mark, label %no
mark:
  %nothing_made = call i1 @marked(ptr %t)
  br i1 %nothing_made, label %rows, label %no
rows:
  %all = call i1 @unchanged(ptr %t)
  ret i1 %all
no:
  ret i1 0
}

; Gives 0: nothing was done; $DONE; or $STOPPED: the call came to an end of its own before the last of its parts.
define ptr @replay(ptr %self, ptr %args, i64 %count) {
entry:
  %t = call ptr @PyLong_AsVoidPtr(ptr %self)
  %acquire = call ptr @field(ptr %t, i64 $ACQUIRE)
  %release = call ptr @field(ptr %t, i64 $RELEASE)
  call void @tell(ptr %acquire)
  call void @put(ptr %t, i64 $CHANGED, i64 -1)
  %ok = call i1 @may(ptr %t, ptr %args, i64 %count)
  br i1 %ok, label %go, label %leave
leave:
  call void @PyErr_Clear()
  call void @tell(ptr %release)
  %nothing = call ptr @PyLong_FromLong(i64 0)
  ret ptr %nothing
go:
  %at = call ptr @field(ptr %t, i64 $AT)
  %function = call ptr @field(ptr %t, i64 $FUNCTION)
  %a0 = call i64 @word(ptr %t, i64 $A0)
  %a1 = call i64 @word(ptr %t, i64 $A1)
  %a2 = call i64 @word(ptr %t, i64 $A2)
  %a3 = call i64 @word(ptr %t, i64 $A3)
  %additions = call ptr @field(ptr %t, i64 $ADDITIONS)
  %addition_count = call i64 @word(ptr %t, i64 $ADDITION_COUNT)
  call void @add_all(ptr %additions, i64 %addition_count)
  store i64 0, ptr %at
  %state = call ptr @PyEval_SaveThread()
  call void %function(i64 %a0, i64 %a1, i64 %a2, i64 %a3)
  call void @PyEval_RestoreThread(ptr %state)
  %came = load i64, ptr %at
  call void @tell(ptr %release)
  %parts = call i64 @word(ptr %t, i64 $PARTS)
  %all = icmp eq i64 %came, %parts
  %code = select i1 %all, i64 $DONE, i64 $STOPPED
  %result = call ptr @PyLong_FromLong(i64 %code)
  ret ptr %result
}
