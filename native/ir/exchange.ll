; The calls of a collective over shared memory, one after the other, as long as each can be done at once or comes within
; the limit of one wait; `native/exchange.py` makes the tables and has their words. Needs sequence.ll and words.ll.

declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

; The acknowledgement word of message %number among those that begin at %acks.
define internal ptr @ack_of(ptr %acks, i64 %number) alwaysinline {
  %slot = and i64 %number, $LAST_SLOT
  %p = getelementptr i32, ptr %acks, i64 %slot
  ret ptr %p
}

define internal ptr @slot_of(ptr %slots, i64 %number) alwaysinline {
  %slot = and i64 %number, $LAST_SLOT
  %offset = mul i64 %slot, $SLOT_NBYTES
  %p = getelementptr i8, ptr %slots, i64 %offset
  ret ptr %p
}

define internal i32 @await(ptr %run, ptr %link, ptr %word, i32 %target, i32 %code) {
  %bell = call ptr @field(ptr %link, i64 $MY_BELL)
  %interest = call ptr @field(ptr %link, i64 $MY_INTEREST)
  %spins = call i64 @word(ptr %run, i64 $SPINS)
  %limit = call ptr @field(ptr %run, i64 $LIMIT)
  %r = call i32 @wait(ptr %word, i32 %target, ptr %bell, ptr %interest, i32 %code, i64 %spins, ptr %limit)
  ret i32 %r
}

; Whether the message was sent; not, if the ring has no room.
define internal i1 @send(ptr %run, ptr %step, ptr %link) {
entry:
  %number = call i64 @word(ptr %link, i64 $OUT_NUMBER)
  %acks = call ptr @field(ptr %link, i64 $OUT_ACKS)
  %ack = call ptr @ack_of(ptr %acks, i64 %number)
  %first = icmp slt i64 %number, $RING
  br i1 %first, label %room, label %full
full:
  %seen = load atomic i32, ptr %ack acquire, align 4
  %low = trunc i64 %number to i32
  %free = sub i32 %low, $BEFORE
  %is_free = icmp eq i32 %seen, %free
  br i1 %is_free, label %room, label %refuse
refuse:
  ret i1 0
room:
  %slots = call ptr @field(ptr %link, i64 $OUT_SLOTS)
  %slot = call ptr @slot_of(ptr %slots, i64 %number)
  %header = call ptr @field(ptr %step, i64 $HEADER)
  call void @llvm.memcpy.p0.p0.i64(ptr %slot, ptr %header, i64 $HEADER_NBYTES, i1 0)
  %sequence = call i64 @word(ptr %run, i64 $SEQUENCE)
  call void @put(ptr %slot, i64 $AT_SEQUENCE, i64 %sequence)
  call void @put(ptr %slot, i64 $AT_NUMBER, i64 %number)
  %places = call ptr @field(ptr %run, i64 $PLACES)
  %place = call i64 @word(ptr %step, i64 $PLACE)
  %address = call i64 @word(ptr %places, i64 %place)
  %base = call i64 @word(ptr %run, i64 $ARENA)
  %offset = sub i64 %address, %base
  call void @put(ptr %slot, i64 $AT_OFFSET, i64 %offset)
  call void @put(ptr %step, i64 $NUMBER, i64 %number)
  %next = add i64 %number, 1
  call void @put(ptr %link, i64 $OUT_NUMBER, i64 %next)
  %tail = call ptr @field(ptr %link, i64 $OUT_TAIL)
  %bell = call ptr @field(ptr %link, i64 $THEIR_BELL)
  %interest = call ptr @field(ptr %link, i64 $THEIR_INTEREST)
  %code = call i64 @word(ptr %link, i64 $MY_TAIL)
  %code32 = trunc i64 %code to i32
  %next32 = trunc i64 %next to i32
  call void @publish(ptr %tail, i32 %next32, ptr %bell, ptr %interest, i32 %code32)
  ret i1 1
}

define internal i1 @same(ptr %slot, ptr %header, i64 %i) alwaysinline {
  %a = call i64 @word(ptr %slot, i64 %i)
  %b = call i64 @word(ptr %header, i64 %i)
  %r = icmp eq i64 %a, %b
  ret i1 %r
}

; Whether the next message has come and is the one expected: then its place is where it lies.
define internal i1 @receive(ptr %run, ptr %step, ptr %link) {
entry:
  %number = call i64 @word(ptr %link, i64 $IN_NUMBER)
  %next = add i64 %number, 1
  %next32 = trunc i64 %next to i32
  %tail = call ptr @field(ptr %link, i64 $IN_TAIL)
  %code = call i64 @word(ptr %link, i64 $CODE_TAIL)
  %code32 = trunc i64 %code to i32
  %late = call i32 @await(ptr %run, ptr %link, ptr %tail, i32 %next32, i32 %code32)
  %came = icmp eq i32 %late, 0
  br i1 %came, label %look, label %refuse
look:
  %slots = call ptr @field(ptr %link, i64 $IN_SLOTS)
  %slot = call ptr @slot_of(ptr %slots, i64 %number)
  %header = call ptr @field(ptr %step, i64 $HEADER)
  %s0 = call i1 @same(ptr %slot, ptr %header, i64 0)
  %s1 = call i1 @same(ptr %slot, ptr %header, i64 1)
  %s2 = call i1 @same(ptr %slot, ptr %header, i64 2)
  %s3 = call i1 @same(ptr %slot, ptr %header, i64 3)
  %s5 = call i1 @same(ptr %slot, ptr %header, i64 5)
  %s7 = call i1 @same(ptr %slot, ptr %header, i64 $AT_TOTAL)
  %s9 = call i1 @same(ptr %slot, ptr %header, i64 9)
  %sequence = call i64 @word(ptr %run, i64 $SEQUENCE)
  %told = call i64 @word(ptr %slot, i64 $AT_SEQUENCE)
  %s4 = icmp eq i64 %sequence, %told
  %offset = call i64 @word(ptr %slot, i64 $AT_OFFSET)
  %total = call i64 @word(ptr %header, i64 $AT_TOTAL)
  %remote = call i64 @word(ptr %link, i64 $REMOTE_NBYTES)
  %room = sub i64 %remote, %total
  %inside = icmp ule i64 %offset, %room
  %a = and i1 %s0, %s1
  %b = and i1 %s2, %s3
  %c = and i1 %s4, %s5
  %d = and i1 %s7, %s9
  %ab = and i1 %a, %b
  %cd = and i1 %c, %d
  %abcd = and i1 %ab, %cd
  %right = and i1 %abcd, %inside
  br i1 %right, label %take, label %refuse
refuse:
  ret i1 0
take:
  %base = call i64 @word(ptr %link, i64 $REMOTE_BASE)
  %address = add i64 %base, %offset
  %places = call ptr @field(ptr %run, i64 $PLACES)
  %place = call i64 @word(ptr %step, i64 $PLACE)
  call void @put(ptr %places, i64 %place, i64 %address)
  call void @put(ptr %step, i64 $NUMBER, i64 %number)
  call void @put(ptr %link, i64 $IN_NUMBER, i64 %next)
  ret i1 1
}

; Gives back the message that the step %of has received.
define internal void @release(ptr %of, ptr %link) {
  %number = call i64 @word(ptr %of, i64 $NUMBER)
  %next = add i64 %number, 1
  %next32 = trunc i64 %next to i32
  %acks = call ptr @field(ptr %link, i64 $IN_ACKS)
  %ack = call ptr @ack_of(ptr %acks, i64 %number)
  %bell = call ptr @field(ptr %link, i64 $THEIR_BELL)
  %interest = call ptr @field(ptr %link, i64 $THEIR_INTEREST)
  %code = call i64 @word(ptr %link, i64 $MY_ACK)
  %code32 = trunc i64 %code to i32
  call void @publish(ptr %ack, i32 %next32, ptr %bell, ptr %interest, i32 %code32)
  ret void
}

; Whether the message that another step has sent is released.
define internal i1 @settle(ptr %run, ptr %step, ptr %link) {
  %of = call ptr @field(ptr %step, i64 $OF)
  %number = call i64 @word(ptr %of, i64 $NUMBER)
  %next = add i64 %number, 1
  %next32 = trunc i64 %next to i32
  %acks = call ptr @field(ptr %link, i64 $OUT_ACKS)
  %ack = call ptr @ack_of(ptr %acks, i64 %number)
  %code = call i64 @word(ptr %link, i64 $CODE_ACK)
  %code32 = trunc i64 %code to i32
  %late = call i32 @await(ptr %run, ptr %link, ptr %ack, i32 %next32, i32 %code32)
  %r = icmp eq i32 %late, 0
  ret i1 %r
}

define internal void @copy(ptr %run, ptr %step) {
entry:
  %places = call ptr @field(ptr %run, i64 $PLACES)
  %i = call i64 @word(ptr %step, i64 $TO)
  %j = call i64 @word(ptr %step, i64 $PLACE)
  %to = call ptr @field(ptr %places, i64 %i)
  %from = call ptr @field(ptr %places, i64 %j)
  %nbytes = call i64 @word(ptr %step, i64 $NBYTES)
  %same = icmp eq ptr %to, %from
  br i1 %same, label %done, label %move
move:
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %nbytes, i1 0)
  br label %done
done:
  ret void
}

; The kernel's pointers are those of its places.
define internal void @kernel(ptr %run, ptr %step) {
entry:
  %places = call ptr @field(ptr %run, i64 $PLACES)
  %buffers = call ptr @field(ptr %step, i64 $BUFFERS)
  %args = call ptr @field(ptr %step, i64 $ARGS)
  %count = call i64 @word(ptr %step, i64 $COUNT)
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i1, %loop]
  %place = call i64 @word(ptr %args, i64 %i)
  %address = call i64 @word(ptr %places, i64 %place)
  call void @put(ptr %buffers, i64 %i, i64 %address)
  %i1 = add i64 %i, 1
  %more = icmp slt i64 %i1, %count
  br i1 %more, label %loop, label %call
call:
  %fn = call ptr @field(ptr %step, i64 $FUNCTION)
  %total = call i64 @word(ptr %step, i64 $TOTAL)
  %grain = call i64 @word(ptr %step, i64 $GRAIN)
  %team = call ptr @field(ptr %run, i64 $TEAM)
  %scratch = call ptr @field(ptr %run, i64 $SCRATCH)
  call void %team(ptr %fn, ptr %buffers, ptr null, i64 %total, i64 %grain, ptr %scratch)
  ret void
}

; From the first step on; the number of the one that it could not do, or how many there are.
define i64 @exchange(ptr %run) {
entry:
  %steps = call ptr @field(ptr %run, i64 $STEPS)
  %count = call i64 @word(ptr %run, i64 $STEP_COUNT)
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i1, %next]
  %some = icmp slt i64 %i, %count
  br i1 %some, label %go, label %end
go:
  %step = getelementptr [$STEP_WORDS x i64], ptr %steps, i64 %i
  %kind = call i64 @word(ptr %step, i64 $KIND)
  %link = call ptr @field(ptr %step, i64 $LINK)
  switch i64 %kind, label %end [
    i64 $SEND, label %do_send
    i64 $RECEIVE, label %do_receive
    i64 $RECEIVE_INTO, label %do_receive_into
    i64 $RELEASE, label %do_release
    i64 $SETTLE, label %do_settle
    i64 $COPY, label %do_copy
    i64 $KERNEL, label %do_kernel
  ]
do_send:
  %sent = call i1 @send(ptr %run, ptr %step, ptr %link)
  br i1 %sent, label %next, label %end
do_receive:
  %got = call i1 @receive(ptr %run, ptr %step, ptr %link)
  br i1 %got, label %next, label %end
do_receive_into:
  %there = call i1 @receive(ptr %run, ptr %step, ptr %link)
  br i1 %there, label %take, label %end
take:
  call void @copy(ptr %run, ptr %step)
  call void @release(ptr %step, ptr %link)
  br label %next
do_release:
  %of = call ptr @field(ptr %step, i64 $OF)
  call void @release(ptr %of, ptr %link)
  br label %next
do_settle:
  %settled = call i1 @settle(ptr %run, ptr %step, ptr %link)
  br i1 %settled, label %next, label %end
do_copy:
  call void @copy(ptr %run, ptr %step)
  br label %next
do_kernel:
  call void @kernel(ptr %run, ptr %step)
  br label %next
next:
  %i1 = add i64 %i, 1
  br label %loop
end:
  ret i64 %i
}
