//! The dynamic linker's functions, without needing them.
//!
//! A preloaded library with a symbol that cannot be found ends every program that it is loaded into
//! (musl), or is left out, and the quota with it (glibc). So what some C library lacks is referred to
//! weakly: `dlvsym` and `__register_atfork` do not exist in musl; and before glibc 2.34 `dlopen`,
//! `dlclose` and `dlvsym` are libdl's, which a program that loads nothing at run time does
//! not have. Opening it there on our account alone cost every process 25 µs. A process that gets
//! libdl later, with what some plugin of libc's needs, is served by [`loaded`].

use crate::loaded;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;

/// `dlvsym(3)`.
pub(crate) type Dlvsym =
    unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// What the dynamic linker bound a weak reference to when it loaded this library; null if nothing.
macro_rules! weak {
    ($symbol:literal) => {{
        let at: *mut c_void;
        // SAFETY: reads a word of this library's global offset table, which the dynamic linker has
        // filled in before any code here runs.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            core::arch::asm!(
                concat!(".weak ", $symbol),
                concat!("mov {}, qword ptr [rip + ", $symbol, "@GOTPCREL]"),
                out(reg) at,
                options(nostack, preserves_flags, readonly, pure),
            );
            #[cfg(target_arch = "aarch64")]
            core::arch::asm!(
                concat!(".weak ", $symbol),
                concat!("adrp {at}, :got:", $symbol),
                concat!("ldr {at}, [{at}, :got_lo12:", $symbol, "]"),
                at = out(reg) at,
                options(nostack, preserves_flags, readonly, pure),
            );
        }
        at
    }};
}

/// A function of that name and type: by a weak reference, else in what has been loaded since.
macro_rules! linked {
    ($symbol:literal as $function:ty) => {{
        let bound = weak!($symbol);
        let name = CStr::from_bytes_with_nul(concat!($symbol, "\0").as_bytes());
        let found = match bound.is_null() {
            true => name.ok().and_then(loaded::function),
            false => Some(bound),
        };
        // SAFETY: a function of that name has this signature.
        found.map(|found| unsafe { core::mem::transmute::<*mut c_void, $function>(found) })
    }};
}

/// `dlopen(3)`; NULL where the process has none, and so nothing that could be opened.
///
/// # Safety
/// As `dlopen`.
pub(crate) unsafe fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void {
    type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
    match linked!("dlopen" as Dlopen) {
        // SAFETY: the arguments are the caller's.
        Some(dlopen) => unsafe { dlopen(file, flags) },
        None => ptr::null_mut(),
    }
}

/// `dlclose(3)`.
///
/// # Safety
/// As `dlclose`.
pub(crate) unsafe fn dlclose(handle: *mut c_void) -> c_int {
    type Dlclose = unsafe extern "C" fn(*mut c_void) -> c_int;
    // SAFETY: the argument is the caller's.
    linked!("dlclose" as Dlclose).map_or(-1, |dlclose| unsafe { dlclose(handle) })
}

/// `dlvsym(3)`, if the process had it when it started.
pub(crate) fn dlvsym() -> Option<Dlvsym> {
    let dlvsym = weak!("dlvsym");
    // SAFETY: non-null, a function of that name, which has this signature.
    (!dlvsym.is_null()).then(|| unsafe { core::mem::transmute::<*mut c_void, Dlvsym>(dlvsym) })
}

/// Has `handler` called in every forked child from now on. (`pthread_atfork` would need
/// `libpthread.so.0` before glibc 2.34; what it calls is libc's own, LSB Core "__register_atfork".)
pub(crate) fn at_fork_in_child(handler: extern "C" fn()) {
    type Handler = Option<extern "C" fn()>;
    type RegisterAtFork = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;
    let register = weak!("__register_atfork");
    if register.is_null() {
        return;
    }
    // SAFETY: a function of that name has this signature; the shim is never unloaded.
    unsafe {
        core::mem::transmute::<*mut c_void, RegisterAtFork>(register)(
            None,
            None,
            Some(handler),
            ptr::null_mut(),
        );
    }
}

/// A detached-in-effect thread with a small stack, or with one of the default size where static TLS leaves too little
/// of that (`pthread_create(3)`, `EINVAL`); false where the process can have none. Before glibc 2.34 threads are
/// libpthread's, which the driver library needs.
///
/// # Safety
/// `main` may be called with `argument` on another thread, at any time from now on.
pub(crate) unsafe fn start_thread(
    main: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> bool {
    type Create = unsafe extern "C" fn(
        *mut libc::pthread_t,
        *const libc::pthread_attr_t,
        extern "C" fn(*mut c_void) -> *mut c_void,
        *mut c_void,
    ) -> c_int;
    type Init = unsafe extern "C" fn(*mut libc::pthread_attr_t) -> c_int;
    type SetStack = unsafe extern "C" fn(*mut libc::pthread_attr_t, usize) -> c_int;
    /// The driver's own needs, and those of profilers that it calls back; touched as far as it is used.
    const STACK: usize = 1 << 20;
    let Some(create) = linked!("pthread_create" as Create) else { return false };
    let init = linked!("pthread_attr_init" as Init);
    let set = linked!("pthread_attr_setstacksize" as SetStack);
    let mut attributes = core::mem::MaybeUninit::<libc::pthread_attr_t>::uninit();
    let mut thread = core::mem::MaybeUninit::<libc::pthread_t>::uninit();
    // SAFETY: attributes that `init` made, which own nothing as long as they have no processor set.
    unsafe {
        let with = match (init, set) {
            (Some(init), Some(set)) => {
                init(attributes.as_mut_ptr());
                set(attributes.as_mut_ptr(), STACK);
                attributes.as_ptr()
            }
            _ => ptr::null(),
        };
        create(thread.as_mut_ptr(), with, main, argument) == 0
            || create(thread.as_mut_ptr(), ptr::null(), main, argument) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weak_reference_is_the_function_or_null() {
        assert_eq!(weak!("getpid").cast_const(), libc::getpid as *const c_void);
        assert!(weak!("tessera_no_such_function").is_null());
    }

    #[test]
    fn this_program_has_a_dynamic_linker() {
        // SAFETY: NULL names the program itself.
        let own = unsafe { dlopen(ptr::null(), libc::RTLD_LAZY) };
        assert!(!own.is_null() && dlvsym().is_some());
        // SAFETY: the handle just opened.
        assert_eq!(unsafe { dlclose(own) }, 0);
    }
}
