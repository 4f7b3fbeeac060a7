// Compiles a function for several vector widths and picks one when the library is loaded.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HYBRIDRL_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HYBRIDRL_CLONES
#endif

#define HYBRIDRL_INLINE __attribute__((always_inline)) inline
