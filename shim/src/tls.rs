//! `__tls_get_addr` of the shim's own, so that it does not need `ld-linux-x86-64.so.2`, the one library
//! name that musl does not know as its own.
//!
//! std is compiled for thread-locals that may lie anywhere, and asks the dynamic linker where
//! (`__tls_get_addr`, the "general dynamic" model of U. Drepper, "ELF Handling For Thread-Local
//! Storage", 4.1). Here the answer is fixed: `tessera_shim_core`'s launch record is in static TLS, so
//! the whole block of this library is, at one distance from every thread's pointer. Hidden: no other
//! library's thread-locals come here.
//!
//! aarch64 does without: its model (TLS descriptors) names no function.

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .text.__tls_get_addr,\"ax\",@progbits",
    ".globl __tls_get_addr",
    ".hidden __tls_get_addr",
    ".type __tls_get_addr, @function",
    ".balign 16",
    "__tls_get_addr:",
    // rdi: module (this one), offset in the module's block
    "movq 8(%rdi), %rax",
    "addq %fs:0, %rax",
    // where the record is, less where it is in the block: where the block is
    "addq tessera_record@GOTTPOFF(%rip), %rax",
    "subq $tessera_record@DTPOFF, %rax",
    "retq",
    ".size __tls_get_addr, . - __tls_get_addr",
    ".popsection",
    options(att_syntax),
);
