; Whether things that Python can read are what they were: rows of (kind, object, key, value), made by
; `native/checks.py`. Needs words.ll. What is not there reads as null.

declare ptr @PyObject_CallNoArgs(ptr)
declare i64 @PyObject_Size(ptr)
declare ptr @PyObject_GetAttr(ptr, ptr)
declare ptr @PyObject_GetItem(ptr, ptr)
declare ptr @PyDict_GetItemWithError(ptr, ptr)
declare ptr @PyList_GetItem(ptr, i64)
declare i32 @PyContextVar_Get(ptr, ptr, ptr)
declare void @PyErr_Clear()
declare void @Py_DecRef(ptr)

define internal void @drop(ptr %object) alwaysinline {
entry:
  %none = icmp eq ptr %object, null
  br i1 %none, label %end, label %some
some:
  call void @Py_DecRef(ptr %object)
  br label %end
end:
  ret void
}

; The value of a context variable, whose reference is dropped.
define internal ptr @variable(ptr %variable) {
  %out = alloca ptr
  store ptr null, ptr %out
  %failed = call i32 @PyContextVar_Get(ptr %variable, ptr null, ptr %out)
  %value = load ptr, ptr %out
  call void @drop(ptr %value)
  ret ptr %value
}

; What a row reads now, an object or a number; references are dropped. (Only addresses are compared, and the row keeps
; the object that it was.)
define internal ptr @read(i64 %kind, ptr %object, ptr %key) {
entry:
  switch i64 %kind, label %unknown [
    i64 $WORD, label %word
    i64 $ITEM, label %item
    i64 $ELEMENT, label %element
    i64 $MAPPED, label %mapped
    i64 $ATTRIBUTE, label %attribute
    i64 $SIZE, label %size
    i64 $VARIABLE, label %variable
    i64 $REFERRED, label %referred
    i64 $CALLED, label %called
  ]
unknown:
  unreachable
word:
  %w = load ptr, ptr %object
  ret ptr %w
item:
  %i = call ptr @PyDict_GetItemWithError(ptr %object, ptr %key)
  ret ptr %i
element:
  %n = ptrtoint ptr %key to i64
  %e = call ptr @PyList_GetItem(ptr %object, i64 %n)
  ret ptr %e
mapped:
  %m = call ptr @PyObject_GetItem(ptr %object, ptr %key)
  call void @drop(ptr %m)
  ret ptr %m
attribute:
  %a = call ptr @PyObject_GetAttr(ptr %object, ptr %key)
  call void @drop(ptr %a)
  ret ptr %a
size:
  %s = call i64 @PyObject_Size(ptr %object)
  %sp = inttoptr i64 %s to ptr
  ret ptr %sp
variable:
  %v = call ptr @variable(ptr %object)
  ret ptr %v
referred:
  %r = call ptr @PyObject_CallNoArgs(ptr %object)
  %gone = icmp eq ptr %r, null
  br i1 %gone, label %nothing, label %there
there:
  %ra = call ptr @PyObject_GetAttr(ptr %r, ptr %key)
  call void @drop(ptr %ra)
  call void @drop(ptr %r)
  ret ptr %ra
called:
  %c = call ptr @PyObject_CallNoArgs(ptr %object)
  call void @drop(ptr %c)
  ret ptr %c
nothing:
  ret ptr null
}

; The number of the first row that reads something else now, or the count of the rows.
define internal i64 @first_change(ptr %rows, i64 %count) {
entry:
  br label %loop
loop:
  %n = phi i64 [0, %entry], [%n1, %same]
  %some = icmp slt i64 %n, %count
  br i1 %some, label %look, label %end
look:
  %row = getelementptr [$CHECK_WORDS x i64], ptr %rows, i64 %n
  %kind = call i64 @word(ptr %row, i64 0)
  %object = call ptr @field(ptr %row, i64 1)
  %key = call ptr @field(ptr %row, i64 2)
  %was = call ptr @field(ptr %row, i64 3)
  %now = call ptr @read(i64 %kind, ptr %object, ptr %key)
  %none = icmp eq ptr %now, null
  br i1 %none, label %clear, label %compare
clear:
  call void @PyErr_Clear()
  br label %compare
compare:
  %equal = icmp eq ptr %now, %was
  br i1 %equal, label %same, label %end
same:
  %n1 = add i64 %n, 1
  br label %loop
end:
  ret i64 %n
}
