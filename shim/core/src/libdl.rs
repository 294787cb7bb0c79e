//! The dynamic linker's functions, without needing them.
//!
//! A preloaded library with a symbol that cannot be found ends every program that it is loaded into
//! (musl), or is left out, and the quota with it (glibc). So what some C library lacks is referred to
//! weakly: `dlvsym` does not exist in musl; and before glibc 2.34 `dlopen`,
//! `dlclose` and `dlvsym` are libdl's, which a program that loads nothing at run time does
//! not have. Opening it there on our account alone cost every process 25 µs. A process that gets
//! libdl later, with what some plugin of libc's needs, is served by [`function`].

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;

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
            true => name.ok().and_then(function),
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

// The files that the process has loaded: which one an address is in, and what functions they export.
//
// The dynamic linker knows both better. But `dladdr` is libdl's before glibc 2.34, and where there
// is no `dlvsym` (musl, processes without libdl) nothing else leads to the `dlsym` behind our own;
// see [`crate::libdl`]. Formats: System V ABI, chapter 5 ("Dynamic Linking").

const PT_DYNAMIC: u32 = 2;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
const STT_FUNC: u8 = 2;

/// `Elf64_Dyn`
#[repr(C)]
struct Dynamic {
    tag: u64,
    value: u64,
}

/// `Elf64_Sym`
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct File {
    base: u64,
    /// As `dlopen` takes it; empty for the program itself.
    pub(crate) name: *const c_char,
}

impl PartialEq for File {
    fn eq(&self, other: &Self) -> bool {
        self.base == other.base
    }
}

/// Has `see` look at the loaded files, in the order of the global scope, until it has found something.
fn each<F: FnMut(&libc::dl_phdr_info) -> bool>(mut see: F) {
    unsafe extern "C" fn visit<F: FnMut(&libc::dl_phdr_info) -> bool>(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        see: *mut c_void,
    ) -> c_int {
        // SAFETY: called back below only, with this.
        c_int::from(unsafe { (*see.cast::<F>())(&*info) })
    }
    // SAFETY: `visit` takes what dl_iterate_phdr gives, and `see` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit::<F>), (&raw mut see).cast()) };
}

pub(crate) fn file_of(address: *const c_void) -> Option<File> {
    let mut found = None;
    each(|info| {
        if holds(info, address.addr() as u64) {
            found = Some(File { base: info.dlpi_addr, name: info.dlpi_name });
        }
        found.is_some()
    });
    found
}

fn headers(info: &libc::dl_phdr_info) -> &[libc::Elf64_Phdr] {
    if info.dlpi_phdr.is_null() {
        return &[];
    }
    // SAFETY: the file's program headers, mapped for as long as it is loaded.
    unsafe { core::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) }
}

fn holds(info: &libc::dl_phdr_info, address: u64) -> bool {
    headers(info).iter().any(|header| {
        let start = info.dlpi_addr.wrapping_add(header.p_vaddr);
        header.p_type == libc::PT_LOAD && address.wrapping_sub(start) < header.p_memsz
    })
}

/// The function `name` of the first file after this library that exports one, as `RTLD_NEXT` means
/// it; else of any other file.
pub(crate) fn function(name: &CStr) -> Option<*mut c_void> {
    let own = (file_of as *const c_void).addr() as u64;
    let (mut passed_own, mut before, mut after) = (false, None, None);
    each(|info| {
        if holds(info, own) {
            passed_own = true;
            return false;
        }
        let wanted = if passed_own { &mut after } else { &mut before };
        if wanted.is_none()
            && let Some(dynamic) = headers(info).iter().find(|header| header.p_type == PT_DYNAMIC)
        {
            let at = info.dlpi_addr.wrapping_add(dynamic.p_vaddr);
            // SAFETY: the dynamic section of a loaded file.
            *wanted = unsafe { find(info.dlpi_addr, pointer(at), name) };
        }
        after.is_some()
    });
    after.or(before)
}

#[expect(clippy::cast_possible_truncation, reason = "64-bit only, see lib.rs")]
fn pointer<T>(address: u64) -> *const T {
    // Addresses of other files, for which there is no pointer to derive one from.
    ptr::with_exposed_provenance(address as usize)
}

/// # Safety
/// `dynamic` must be the dynamic section of a file loaded at `base`.
unsafe fn find(base: u64, mut dynamic: *const Dynamic, name: &CStr) -> Option<*mut c_void> {
    let (mut strings, mut symbols, mut gnu_hash) = (0, 0, 0);
    // SAFETY: a dynamic section ends with a null tag.
    while let entry = unsafe { &*dynamic }
        && entry.tag != 0
    {
        // glibc has relocated these addresses in place; musl, and the kernel's vdso, have not.
        let address = if entry.value < base { base.wrapping_add(entry.value) } else { entry.value };
        match entry.tag {
            DT_STRTAB => strings = address,
            DT_SYMTAB => symbols = address,
            DT_GNU_HASH => gnu_hash = address,
            _ => {}
        }
        // SAFETY: not the last entry.
        dynamic = unsafe { dynamic.add(1) };
    }
    // Every libc that this one can be loaded beside has the newer of the two hash tables.
    if strings == 0 || symbols == 0 || gnu_hash == 0 {
        return None;
    }
    let table: *const Symbol = pointer(symbols);
    let strings: *const c_char = pointer(strings);
    let is_it = |index: u32| {
        // SAFETY: an index that the file's own hash table named, and a name of its string table.
        unsafe {
            let symbol = &*table.add(index as usize);
            let defined = symbol.section != 0 && symbol.info & 0xf == STT_FUNC;
            (defined && CStr::from_ptr(strings.add(symbol.name as usize)) == name)
                .then(|| pointer::<c_void>(base.wrapping_add(symbol.value)).cast_mut())
        }
    };
    // SAFETY: the file's own hash table.
    unsafe { by_gnu_hash(pointer(gnu_hash), name, is_it) }
}

/// # Safety
/// `table` must be a file's `DT_GNU_HASH`: a Bloom filter, buckets, and hashes of which the last of
/// each bucket has its lowest bit set.
unsafe fn by_gnu_hash(
    table: *const u32,
    name: &CStr,
    is_it: impl Fn(u32) -> Option<*mut c_void>,
) -> Option<*mut c_void> {
    let hash = name
        .to_bytes()
        .iter()
        .fold(5381u32, |hash, &byte| hash.wrapping_mul(33).wrapping_add(u32::from(byte)));
    // SAFETY: the table's form: four counts, 64-bit filter words, buckets, hashes.
    unsafe {
        let (buckets, hashed_from, filters) = (*table, *table.add(1), *table.add(2));
        if buckets == 0 {
            return None;
        }
        let first = table.add(4 + 2 * filters as usize);
        let hashes = first.add(buckets as usize);
        let mut index = *first.add((hash % buckets) as usize);
        if index < hashed_from {
            return None;
        }
        loop {
            let other = *hashes.add((index - hashed_from) as usize);
            if other | 1 == hash | 1
                && let Some(found) = is_it(index)
            {
                return Some(found);
            }
            if other & 1 == 1 {
                return None;
            }
            index += 1;
        }
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
    fn functions_are_where_the_dynamic_linker_finds_them() {
        for (name, expected) in [
            (c"dlsym", libc::dlsym as *const c_void),
            (c"getpid", libc::getpid as *const c_void),
            (c"dl_iterate_phdr", libc::dl_iterate_phdr as *const c_void),
        ] {
            assert_eq!(function(name).expect("in libc").cast_const(), expected, "{name:?}");
        }
        assert_eq!(function(c"tessera_no_such_function"), None);
        assert_eq!(function(c"stderr"), None, "data");
    }

    #[test]
    fn an_address_is_in_the_file_that_brought_it() {
        let own = file_of(function as *const c_void).expect("this program");
        assert_eq!(file_of(file_of as *const c_void), Some(own));
        let libc = file_of(libc::getpid as *const c_void).expect("libc");
        assert_ne!(libc, own);
        // SAFETY: the name of a loaded file.
        assert!(unsafe { CStr::from_ptr(libc.name) }.to_bytes().ends_with(b"libc.so.6"));
        assert_eq!(file_of(ptr::null()), None);
    }
}
