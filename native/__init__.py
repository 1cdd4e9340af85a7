"""The ground floor: machine code made and run in this process. It depends on nothing else of the project.

| module | gives |
|---|---|
| `processor` | LLVM's names of the processor, its features, cores and caches: the one place that asks |
| `compiler` | the one LLVM compiler: IR text to object code, object code to addresses |
| `source` | the IR texts in `ir/`, with their constants filled in |
| `futex` | which systems can wait on a word of memory |
| `sequence` | publish a sequence word, and wait for one, between processes |
| `team` | persistent threads that share the parallel loop of a kernel |
| `chain`, `graph` | tables of kernels that one native call runs: block by block, or one after the other |
| `memory` | bytes at an address: as an array, aligned, copied |

LLVM is loaded by the modules that compile, not by this one: `import manygrad` stays quick.
"""
