//! The exported `dlsym`, naked: names that are none of ours reach the real one by a jump, with the
//! caller's return address still on top of the stack. `RTLD_NEXT` and `RTLD_DEFAULT` mean "as seen
//! from my caller", and libc reads the caller off that address.
//!
//! Ours may be only `cu[A-Z]…` and `nvml[A-Z]…`; of these only the table's names are. The prefix is
//! tested in place, so `curl_easy_init`, `cublasCreate` and all the rest cost a few instructions.

use core::arch::naked_asm;
use core::ffi::{CStr, c_char, c_void};
use core::ptr;
use tessera_shim_core::resolve::{self, Export, REAL_DLSYM};

/// # Safety
/// As `dlsym(3)`.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        "endbr64",
        "test rsi, rsi",
        "jz 2f",
        "movzx ecx, byte ptr [rsi]",
        "cmp cl, 'c'",
        "je 4f",
        "cmp cl, 'n'",
        "je 5f",
        // None of ours: the real one answers, to our caller.
        "2:",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "jz 3f",
        "jmp rax",
        // First use: find the real one, then as above.
        "3:",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {find_real}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 9f",
        "jmp rax",
        // cu[A-Z]
        "4:",
        "cmp byte ptr [rsi + 1], 'u'",
        "jne 2b",
        "movzx ecx, byte ptr [rsi + 2]",
        "jmp 6f",
        // nvml[A-Z]
        "5:",
        "cmp byte ptr [rsi + 1], 'v'",
        "jne 2b",
        "cmp byte ptr [rsi + 2], 'm'",
        "jne 2b",
        "cmp byte ptr [rsi + 3], 'l'",
        "jne 2b",
        "movzx ecx, byte ptr [rsi + 4]",
        "6:",
        "sub ecx, 'A'",
        "cmp ecx, 25",
        "ja 2b",
        // Is it in the table?
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "mov rdi, rsi",
        "call {find}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 2b",
        // answer(export, handle, caller)
        "mov rsi, rdi",
        "mov rdi, rax",
        "mov rdx, qword ptr [rsp]",
        "jmp {answer}",
        "9:",
        "xor eax, eax",
        "ret",
        real = sym REAL_DLSYM,
        find_real = sym resolve::find_real_dlsym,
        find = sym find,
        answer = sym answer,
    )
}

/// # Safety
/// As `dlsym(3)`.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        "hint #34", // bti c
        "cbz x1, 2f",
        "ldrb w9, [x1]",
        "cmp w9, #'c'",
        "b.eq 4f",
        "cmp w9, #'n'",
        "b.eq 5f",
        // None of ours: the real one answers, to our caller.
        "2:",
        "adrp x9, {real}",
        "ldr x16, [x9, :lo12:{real}]",
        "cbz x16, 3f",
        "br x16",
        // First use: find the real one, then as above.
        "3:",
        "stp x29, x30, [sp, #-32]!",
        "stp x0, x1, [sp, #16]",
        "mov x29, sp",
        "bl {find_real}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "cbz x16, 9f",
        "br x16",
        // cu[A-Z]
        "4:",
        "ldrb w9, [x1, #1]",
        "cmp w9, #'u'",
        "b.ne 2b",
        "ldrb w9, [x1, #2]",
        "b 6f",
        // nvml[A-Z]
        "5:",
        "ldrb w9, [x1, #1]",
        "cmp w9, #'v'",
        "b.ne 2b",
        "ldrb w9, [x1, #2]",
        "cmp w9, #'m'",
        "b.ne 2b",
        "ldrb w9, [x1, #3]",
        "cmp w9, #'l'",
        "b.ne 2b",
        "ldrb w9, [x1, #4]",
        "6:",
        "sub w9, w9, #'A'",
        "cmp w9, #25",
        "b.hi 2b",
        // Is it in the table?
        "stp x29, x30, [sp, #-32]!",
        "stp x0, x1, [sp, #16]",
        "mov x29, sp",
        "mov x0, x1",
        "bl {find}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "cbz x16, 2b",
        // answer(export, handle, caller)
        "mov x1, x0",
        "mov x0, x16",
        "mov x2, x30",
        "b {answer}",
        "9:",
        "mov x0, xzr",
        "ret",
        real = sym REAL_DLSYM,
        find_real = sym resolve::find_real_dlsym,
        find = sym find,
        answer = sym answer,
    )
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the exported dlsym is written for x86-64 and aarch64 only");

/// The hook of that name; null where the table has none.
extern "C" fn find(name: *const c_char) -> *const Export {
    // SAFETY: called by `dlsym` only, with its caller's non-null NUL-terminated name.
    let name = unsafe { CStr::from_ptr(name) };
    let of = |exports| resolve::find(exports, name);
    of(crate::cuda_exports())
        .or_else(|| of(crate::nvml_exports()))
        .map_or(ptr::null(), ptr::from_ref)
}

/// Answers for a hook that `find` found.
extern "C" fn answer(
    export: *const Export,
    handle: *mut c_void,
    caller: *const c_void,
) -> *mut c_void {
    // SAFETY: called by `dlsym` only: `export` is the non-null answer of `find`, a reference into
    // the table, and `handle` is our caller's.
    unsafe { resolve::answer(&*export, handle, caller) }
}
