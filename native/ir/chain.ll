; The function of a job whose indices are blocks of a chain: for each block it runs a table of kernels, one after the
; other, on pointers of the thread's own to temporaries of the thread's own. `native/chain.py` makes %plan and says what
; is where.
;
; behind the thread's scratch memory ($SCRATCH_BYTES bytes): the number of the block, the pointers, the temporaries

define void @team_chain(ptr %plan, ptr %none, i64 %begin, i64 %end, ptr %scratch) {
entry:
  %p1 = getelementptr i64, ptr %plan, i64 1
  %p2 = getelementptr i64, ptr %plan, i64 2
  %kernels = load i64, ptr %plan
  %moves = load i64, ptr %p1
  %words = load i64, ptr %p2
  %rows = getelementptr i64, ptr %plan, i64 3
  %room = mul i64 %kernels, 4
  %places = getelementptr i64, ptr %rows, i64 %room
  %tables = getelementptr i64, ptr %places, i64 %moves
  %block_at = getelementptr i8, ptr %scratch, i64 $SCRATCH_BYTES
  %own = getelementptr i64, ptr %block_at, i64 1
  %base = ptrtoint ptr %block_at to i64
  br label %copy

; the pointers of all kernels
copy:
  %i = phi i64 [ 0, %entry ], [ %i1, %copied ]
  %more_words = icmp slt i64 %i, %words
  br i1 %more_words, label %copied, label %move
copied:
  %from = getelementptr i64, ptr %tables, i64 %i
  %to = getelementptr i64, ptr %own, i64 %i
  %word = load i64, ptr %from
  store i64 %word, ptr %to
  %i1 = add i64 %i, 1
  br label %copy

; those that are offsets into the thread's memory become addresses
move:
  %j = phi i64 [ 0, %copy ], [ %j1, %moved ]
  %more_moves = icmp slt i64 %j, %moves
  br i1 %more_moves, label %moved, label %blocks
moved:
  %place_at = getelementptr i64, ptr %places, i64 %j
  %place = load i64, ptr %place_at
  %pointer_at = getelementptr i64, ptr %own, i64 %place
  %offset = load i64, ptr %pointer_at
  %pointer = add i64 %offset, %base
  store i64 %pointer, ptr %pointer_at
  %j1 = add i64 %j, 1
  br label %move

; for each block, for each kernel
blocks:
  %block = phi i64 [ %begin, %move ], [ %block1, %next ]
  %more_blocks = icmp slt i64 %block, %end
  br i1 %more_blocks, label %first, label %done
first:
  store i64 %block, ptr %block_at
  br label %kernel
kernel:
  %k = phi i64 [ 0, %first ], [ %k1, %run ]
  %more_kernels = icmp slt i64 %k, %kernels
  br i1 %more_kernels, label %run, label %next
run:
  %row_at = mul i64 %k, 4
  %row = getelementptr i64, ptr %rows, i64 %row_at
  %table_in = getelementptr i64, ptr %row, i64 1
  %totals_in = getelementptr i64, ptr %row, i64 2
  %pitch_in = getelementptr i64, ptr %row, i64 3
  %fn = load ptr, ptr %row
  %table_at = load i64, ptr %table_in
  %totals = load ptr, ptr %totals_in
  %pitch = load i64, ptr %pitch_in
  %skip = mul i64 %block, %pitch
  %total_at = getelementptr i8, ptr %totals, i64 %skip
  %total = load i64, ptr %total_at
  %buffers = getelementptr i64, ptr %own, i64 %table_at
  store i64 0, ptr %scratch
  call void %fn(ptr %buffers, ptr %block_at, i64 0, i64 %total, ptr %scratch)
  %k1 = add i64 %k, 1
  br label %kernel
next:
  %block1 = add i64 %block, 1
  br label %blocks
done:
  ret void
}
