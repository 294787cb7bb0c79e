//! What the process asks of its allocator and of the kernel, so that a node agent stays small. Of the
//! binary, not of the library: a test's process is not the plugin's.
#![allow(unsafe_code)]

use nix::libc::{
    MADV_DONTNEED, PF_W, PT_DYNAMIC, PT_LOAD, c_int, c_void, dl_iterate_phdr, dl_phdr_info,
    madvise, size_t,
};

const PAGE: u64 = 4096;

/// glibc gives nearly each thread a heap of its own, each of which keeps what its thread once needed: on
/// a node of a thousand sessions most of the plugin's memory. Its threads seldom meet in the allocator.
/// And what is large, such as an answer about a thousand pods, goes back to the kernel at once
/// (mallopt(3)).
pub fn keep_one_heap() {
    #[cfg(target_env = "gnu")]
    {
        use nix::libc::{M_ARENA_MAX, M_MMAP_THRESHOLD, mallopt};
        // SAFETY: sets two numbers, before there is another thread. A libc that refuses keeps its own.
        unsafe {
            mallopt(M_ARENA_MAX, 1);
            mallopt(M_MMAP_THRESHOLD, 64 << 10);
        }
    }
}

/// Gives back what only starting needed: relocations, code and tables of programs and libraries
/// (madvise(2), `MADV_DONTNEED`), and what the heap holds free (malloc_trim(3)). What is needed again is
/// mapped from the page cache again.
pub fn give_back() {
    // SAFETY: the callback has the form that dl_iterate_phdr(3) asks for and takes no data.
    unsafe {
        dl_iterate_phdr(Some(give_back_object), std::ptr::null_mut());
    }
    #[cfg(target_env = "gnu")]
    // SAFETY: takes the allocator's own locks.
    unsafe {
        nix::libc::malloc_trim(0);
    }
}

/// One loaded program or library: its segments that nothing writes to, not even the loader, which keeps what
/// it relocates in segments that are writable at first.
unsafe extern "C" fn give_back_object(info: *mut dl_phdr_info, _: size_t, _: *mut c_void) -> c_int {
    // SAFETY: valid for the call, with as many headers as it says; the loader neither maps nor unmaps
    // meanwhile (dl_iterate_phdr(3) holds its lock).
    let (base, headers) = unsafe {
        let info = &*info;
        (info.dlpi_addr, std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()))
    };
    let dynamic = headers.iter().find(|header| header.p_type == PT_DYNAMIC);
    // SAFETY: the object's own table, mapped as long as it is, which ends with an entry of type null.
    if dynamic.is_some_and(|header| unsafe { has_text_relocations(base + header.p_vaddr) }) {
        return 0;
    }
    for header in headers {
        if header.p_type == PT_LOAD && header.p_flags & PF_W == 0 {
            let begin = (base + header.p_vaddr) & !(PAGE - 1);
            let end = (base + header.p_vaddr + header.p_memsz).next_multiple_of(PAGE);
            let Ok(length) = usize::try_from(end - begin) else { continue };
            // SAFETY: a private mapping of a file that is the same as its file, for nobody writes to it:
            // what is dropped is read from there again.
            unsafe {
                madvise(begin as *mut c_void, length, MADV_DONTNEED);
            }
        }
    }
    0
}

/// Whether the loader changed what is not writable (`DT_TEXTREL`, or that flag in `DT_FLAGS`).
///
/// # Safety
///
/// `table` is the address of a dynamic section.
unsafe fn has_text_relocations(table: u64) -> bool {
    const DT_TEXTREL: u64 = 22;
    const DT_FLAGS: u64 = 30;
    const DF_TEXTREL: u64 = 4;
    let mut entry = table as *const [u64; 2];
    loop {
        // SAFETY: the table goes on until an entry of type null, as the caller says.
        match unsafe { entry.read() } {
            [0, _] => return false,
            [DT_TEXTREL, _] => return true,
            [DT_FLAGS, flags] if flags & DF_TEXTREL != 0 => return true,
            _ => {}
        }
        // SAFETY: as above: this one was not the last.
        entry = unsafe { entry.add(1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages that this test's program has of its file, in KiB.
    fn resident_code() -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("/proc");
        let mut is_code = false;
        let mut sum = 0;
        for line in smaps.lines() {
            let mut words = line.split_ascii_whitespace();
            let first = words.next().unwrap_or_default();
            if first.contains('-') {
                is_code = matches!(words.next(), Some("r--p" | "r-xp"));
            } else if first == "Rss:" && is_code {
                sum += words.next().and_then(|kib| kib.parse::<u64>().ok()).expect("a figure");
            }
        }
        sum
    }

    #[test]
    fn a_process_goes_on_without_what_it_gave_back() {
        let before = resident_code();
        give_back();
        assert!(resident_code() < before, "{before} KiB");
        let text: String = (0..1000).map(|n| n.to_string()).collect();
        assert_eq!(text.len(), 2890);
        std::thread::spawn(give_back).join().expect("it does nothing wrong");
        // Formats, hashes and unwinds: tables and code from all over.
        let caught =
            std::panic::catch_unwind(|| panic!("{:?}", std::collections::HashSet::from([1])));
        assert!(caught.is_err());
    }
}
