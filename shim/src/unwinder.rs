//! What the unwinder that zig links in asks of other libraries, so that the shim does not need
//! `libpthread.so.0` and `libdl.so.2`.
//!
//! Before glibc 2.34 `pthread_rwlock_*` are libpthread's alone, and one more library to open costs
//! every process of the container 25 µs (`true_overhead_us`). The unwinder takes these locks around
//! a cache of unwind tables that nobody fills here: the shim aborts on panic and never unwinds. So
//! they need not lock. `dladdr`, libdl's before 2.34 too, is for the names of functions in what it
//! prints; 0 is "unknown". All are hidden: no other library's calls come here.

#[cfg(target_arch = "x86_64")]
macro_rules! succeed {
    () => {
        "xor eax, eax\nret"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! succeed {
    () => {
        "mov w0, wzr\nret"
    };
}

macro_rules! stub {
    ($name:literal) => {
        core::arch::global_asm!(
            concat!(".globl ", $name),
            concat!(".hidden ", $name),
            concat!(".type ", $name, ",@function"),
            concat!($name, ":"),
            succeed!(),
        );
    };
}
stub!("pthread_rwlock_rdlock");
stub!("pthread_rwlock_wrlock");
stub!("pthread_rwlock_unlock");
stub!("dladdr");
