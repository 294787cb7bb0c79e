//! What a lookup of a hooked name answers.
//!
//! Rule one: ask the real resolver first, and put a hook in the place of *the driver's own export*
//! only. NULL stays NULL, and a `cuInit` of some unrelated library stays its own.
//!
//! Rule two: the shim is preloaded, so a lookup in the global scope (`RTLD_DEFAULT`, a handle of
//! `dlopen(NULL)`) finds the shim's own export even where no driver is loaded. Then what counts is
//! what that lookup would have found without the shim.

use crate::libdl;
use crate::real::{self, Symbol, Wanted};
use crate::thread::{Answer, Call};
use core::ffi::{CStr, c_char, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

pub type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The next `dlsym` after the shim's: libc's, or that of another preloaded library. Null until
/// [`find_real_dlsym`] ran.
pub static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Finds and keeps the real `dlsym`. `dlvsym` finds it because its own name is not hooked, and
/// because a lookup with a version never matches the shim's unversioned export. Where there is no
/// `dlvsym` (musl; glibc before 2.34 as long as nothing needs libdl), the symbol tables are read.
pub extern "C" fn find_real_dlsym() -> *mut c_void {
    // The oldest symbol version on each architecture, then the one that glibc 2.34 added.
    const VERSIONS: [&CStr; 2] = if cfg!(target_arch = "x86_64") {
        [c"GLIBC_2.2.5", c"GLIBC_2.34"]
    } else {
        [c"GLIBC_2.17", c"GLIBC_2.34"]
    };
    let by_version = libdl::dlvsym().and_then(|dlvsym| {
        VERSIONS.into_iter().find_map(|version| {
            // SAFETY: two NUL-terminated names; RTLD_NEXT is relative to this library.
            let found = unsafe { dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
            (!found.is_null()).then_some(found)
        })
    });
    let Some(found) = by_version.or_else(|| libdl::function(c"dlsym")) else {
        return ptr::null_mut();
    };
    // Release: pairs with the Acquire in `real_dlsym`.
    REAL_DLSYM.store(found, Ordering::Release);
    found
}

/// The real `dlsym`, called from here: `RTLD_NEXT` then means "after the shim".
pub(crate) fn real_dlsym() -> Option<Dlsym> {
    let mut found = REAL_DLSYM.load(Ordering::Acquire);
    if found.is_null() {
        found = find_real_dlsym();
    }
    if found.is_null() {
        return None;
    }
    // SAFETY: found under the name `dlsym`, which has this signature.
    Some(unsafe { core::mem::transmute::<*mut c_void, Dlsym>(found) })
}

/// One exported hook: the driver's symbol and what we put in its place. Both are kept as distances
/// from the field itself, which the linker knows: as pointers they would be relocated in every
/// process. So an `Export` exists only where [`exports!`](crate::exports) puts it.
#[repr(C)]
#[derive(Debug)]
pub struct Export {
    symbol: i32,
    hook: i32,
}

/// A table of exports, `$table`, that pairs each driver symbol with the function that replaces it.
#[macro_export]
macro_rules! exports {
    ($table:literal $($symbol:path => $hook:path),+ $(,)?) => {
        core::arch::global_asm!(
            concat!(".pushsection .rodata.", $table, ",\"a\",@progbits"),
            concat!(".hidden ", $table),
            concat!(".globl ", $table),
            ".balign 4",
            concat!($table, ":"),
            $($crate::exports!(@one $symbol),)+
            ".popsection",
            $(sym $symbol, sym $hook,)+
        );
    };
    (@one $symbol:path) => { ".long {} - .\n.long {} - ." };
}

impl Export {
    fn symbol(&self) -> &'static Symbol {
        let field = &raw const self.symbol;
        // SAFETY: the table is made by `exports!`: at that distance is a static.
        unsafe { &*field.byte_offset(self.symbol as isize).cast() }
    }

    fn hook(&self) -> *const c_void {
        (&raw const self.hook).wrapping_byte_offset(self.hook as isize).cast()
    }

    /// The driver's own export becomes the hook; anything else stays what it is.
    fn substitute(&self, found: *mut c_void) -> *mut c_void {
        if !found.is_null() && found == self.symbol().pointer() {
            self.hook().cast_mut()
        } else {
            found
        }
    }
}

pub fn find(exports: &'static [Export], name: &CStr) -> Option<&'static Export> {
    exports.iter().find(|export| export.symbol().name() == name)
}

/// Answers `dlsym(handle, name)` for a hooked name on behalf of the code at `caller`.
///
/// The last dynamic-linker call made here decides what `dlerror` says, so every NULL comes from one.
///
/// # Safety
/// As `dlsym`: `handle` must be a live handle or a pseudo-handle.
pub unsafe fn answer(export: &Export, handle: *mut c_void, caller: *const c_void) -> *mut c_void {
    let Some(dlsym) = real_dlsym() else { return ptr::null_mut() };
    let name = export.symbol().name().as_ptr();
    real::bind(export.symbol().library(), Wanted::IfLoaded);

    if handle != libc::RTLD_NEXT {
        // SAFETY: the caller's own arguments.
        let found = unsafe { dlsym(handle, name) };
        if found.cast_const() != export.hook() {
            return export.substitute(found);
        }
    }
    // The global scope without the shim. RTLD_NEXT of a library that stands before the driver in
    // that scope, which is where wrappers are preloaded, means the same.
    // SAFETY: a pseudo-handle and a NUL-terminated name.
    let next = unsafe { dlsym(libc::RTLD_NEXT, name) };
    let own = libdl::file_of(caller);
    if !next.is_null() {
        let wrapper = handle == libc::RTLD_NEXT && own.is_some() && libdl::file_of(next) == own;
        // A wrapper that asks for the function after its own wants the driver's.
        let wanted = if wrapper { export.symbol().pointer() } else { next };
        return export.substitute(wanted);
    }
    // The scope of the caller's own library, if that brought the driver as its dependency.
    if let Some(file) = own {
        // SAFETY: the dynamic linker's own name of the file; RTLD_NOLOAD only takes a reference.
        let library = unsafe { libdl::dlopen(file.name, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if !library.is_null() {
            // SAFETY: the handle is live until the dlclose that gives the reference back.
            let local = unsafe { dlsym(library, name) };
            // SAFETY: as above.
            unsafe { libdl::dlclose(library) };
            if !local.is_null() && local.cast_const() != export.hook() {
                return export.substitute(local);
            }
        }
    }
    // Called from here, not by a jump: the return address decides whose RTLD_NEXT it is.
    // SAFETY: as above; repeated for dlerror's sake.
    core::hint::black_box(unsafe { dlsym(libc::RTLD_NEXT, name) })
}

/// `cuGetProcAddress` of either version (CUDA Driver API, "Driver Entry Point Access"): the driver answers, with
/// the caller's version and flags; only the pointer is replaced by the hook of the export that it is.
///
/// # Safety
/// `call` writes to `pfn`, unless that is null.
pub unsafe fn lookup(exports: &'static [Export], call: Call<'_>, pfn: *mut *mut c_void) -> Answer {
    call()?;
    // SAFETY: null, or the driver has just written it.
    if let Some(pfn) = unsafe { pfn.as_mut() } {
        *pfn = route(exports, *pfn);
    }
    Ok(())
}

/// Replaces a pointer that the driver answered, if it is a hooked export. The *pointer* says which
/// variant the driver chose for the caller's version and flags.
fn route(exports: &'static [Export], found: *mut c_void) -> *mut c_void {
    exports
        .iter()
        .find(|export| !found.is_null() && export.symbol().pointer() == found)
        .map_or(found, |export| export.hook().cast_mut())
}

#[cfg(test)]
mod tests {
    use super::*;

    static HOOK: u8 = 0;
    crate::exports!("tessera_tested_exports" real::cuInit => HOOK);
    unsafe extern "C" {
        #[link_name = "tessera_tested_exports"]
        static EXPORTS: [Export; 1];
    }

    fn exports() -> &'static [Export] {
        // SAFETY: the table above, of one.
        unsafe { &EXPORTS }
    }

    #[test]
    fn the_real_dlsym_is_libcs() {
        let dlsym = real_dlsym().expect("a dlsym after this program's");
        // SAFETY: a pseudo-handle and a NUL-terminated name.
        let getpid = unsafe { dlsym(libc::RTLD_DEFAULT, c"getpid".as_ptr()) };
        assert_eq!(getpid.cast_const(), libc::getpid as *const c_void);
    }

    #[test]
    fn null_is_never_substituted() {
        assert!(exports()[0].substitute(ptr::null_mut()).is_null());
    }

    #[test]
    fn names_of_other_libraries_are_left_alone() {
        let found = find(exports(), c"cuInit").expect("it is there");
        assert_eq!(found.hook(), (&raw const HOOK).cast());
        assert!(ptr::eq(found.symbol(), real::cuInit.symbol()));
        for name in [c"cuInit_v2", c"cublasInit", c"cu", c"cuIni"] {
            assert!(find(exports(), name).is_none(), "{name:?}");
        }
        let stranger = (&raw const HOOK).cast_mut().cast();
        assert_eq!(route(exports(), stranger), stranger);
    }
}
