//! The one body of all fills and copies: `enter`, the driver's function with the caller's own
//! arguments, `leave`.

use super::ARGUMENTS;
use super::admit;
use crate::gate::Pass;
use crate::real::Symbol;
use core::arch::naked_asm;
use core::ffi::c_void;
use core::ptr;
use tessera_cuda::types::CUDA_ERROR_NOT_FOUND;

#[repr(C)]
struct Entered {
    /// The driver's function; null: the call is refused.
    function: *mut c_void,
    /// With which `CUresult`.
    refusal: usize,
}

/// Bytes that the trampoline keeps for a [`Pass`].
const PASS: usize = 32;
const _: () = assert!(size_of::<Pass>() <= PASS && align_of::<Pass>() <= 16);

/// Asks the gate. Where the call may be made, the right to make it is in `pass`.
unsafe extern "C" fn enter(
    symbol: &Symbol,
    arguments: &[usize; ARGUMENTS],
    pass: *mut Pass,
) -> Entered {
    let refused = |result: i32| Entered {
        function: ptr::null_mut(),
        refusal: result.cast_unsigned() as usize,
    };
    let function = symbol.found();
    if function.is_null() {
        return refused(CUDA_ERROR_NOT_FOUND);
    }
    // SAFETY: the caller's own arguments of this function.
    match unsafe { admit(symbol, arguments) } {
        Ok(admitted) => {
            // SAFETY: the trampoline's own room, large and aligned enough.
            unsafe { pass.write(admitted) };
            Entered { function, refusal: 0 }
        }
        Err(result) => refused(result),
    }
}

unsafe extern "C" fn leave(pass: *mut Pass) {
    // SAFETY: written by `enter`, and left once.
    unsafe { pass.drop_in_place() };
}

/// Where the exports jump to, with the address of their [`Symbol`] in `r11` (`x16` on aarch64), and
/// everything else as their caller left it.
///
/// # Safety
/// Only for those jumps, from functions whose arguments are at most six and none a floating-point
/// number.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
pub unsafe extern "C" fn trampoline() {
    naked_asm!(
        ".cfi_startproc",
        "push rbp",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset rbp, -16",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "sub rsp, {pass}",
        // An array of the arguments.
        "push r9",
        "push r8",
        "push rcx",
        "push rdx",
        "push rsi",
        "push rdi",
        "mov rdi, r11",
        "mov rsi, rsp",
        "lea rdx, [rbp - {pass}]",
        "call {enter}",
        "test rax, rax",
        "jz 2f",
        "pop rdi",
        "pop rsi",
        "pop rdx",
        "pop rcx",
        "pop r8",
        "pop r9",
        "call rax",
        // The result, on a stack that stays aligned.
        "push rax",
        "push rax",
        "lea rdi, [rbp - {pass}]",
        "call {leave}",
        "pop rax",
        "leave",
        ".cfi_def_cfa rsp, 8",
        "ret",
        "2:",
        ".cfi_def_cfa rbp, 16",
        "mov eax, edx",
        "leave",
        ".cfi_def_cfa rsp, 8",
        "ret",
        ".cfi_endproc",
        pass = const PASS,
        enter = sym enter,
        leave = sym leave,
    )
}

/// See above.
///
/// # Safety
/// As above.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
pub unsafe extern "C" fn trampoline() {
    naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-96]!",
        ".cfi_def_cfa_offset 96",
        ".cfi_offset x29, -96",
        ".cfi_offset x30, -88",
        "mov x29, sp",
        ".cfi_def_cfa_register x29",
        // An array of the arguments.
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "mov x0, x16",
        "add x1, sp, #16",
        "add x2, sp, #64",
        "bl {enter}",
        "cbz x0, 2f",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x2, x3, [sp, #32]",
        "ldp x4, x5, [sp, #48]",
        "blr x16",
        "str x0, [sp, #16]",
        "add x0, sp, #64",
        "bl {leave}",
        "ldr x0, [sp, #16]",
        "b 3f",
        "2:",
        "mov w0, w1",
        "3:",
        "ldp x29, x30, [sp], #96",
        ".cfi_def_cfa sp, 0",
        "ret",
        ".cfi_endproc",
        enter = sym enter,
        leave = sym leave,
    )
}
