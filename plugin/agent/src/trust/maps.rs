//! What a process has mapped, where that may be read (proc_pid_maps(5)): it says why one goes past the
//! shim. Kernels let the plugin, root without capabilities, read it of processes that are root without
//! capabilities, too; see docs/trust.md for all of them.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tessera_region::layout::CONTAINER_SHIM;

/// Longest text that is read; `vm.max_map_count` allows 65,530 lines by default.
const LONGEST: u64 = 8 << 20;
/// How long to wait: a process that holds its own map's lock blocks readers.
const LIMIT: Duration = Duration::from_millis(250);

/// What matters of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mapped {
    /// The shim, at its place.
    pub shim: bool,
    /// A file named like the driver's library.
    pub cuda: bool,
    /// A file named like the driver's library for OpenCL.
    pub opencl: bool,
}

impl Mapped {
    /// Why such a process is in no slot.
    pub fn why(self) -> &'static str {
        match (self.shim, self.cuda) {
            _ if self.opencl => {
                "libnvidia-opencl is mapped in it: OpenCL is a driver of its own, which the shim does not limit"
            }
            (true, _) => "the shim is mapped in it, and was gone around or its page was emptied",
            (false, true) => "libcuda is mapped in it and the shim is not: it was not preloaded",
            (false, false) => {
                "neither shim nor libcuda is mapped in it: a static program, or the driver by another name"
            }
        }
    }
}

fn judge(maps: &str) -> Mapped {
    let paths = || maps.lines().filter_map(|line| line.splitn(6, ' ').nth(5)).map(str::trim_start);
    let is_mapped = |library: &str| {
        paths().any(|path| path.rsplit('/').next().is_some_and(|file| file.starts_with(library)))
    };
    Mapped {
        shim: paths().any(|path| path == CONTAINER_SHIM),
        cuda: is_mapped("libcuda.so"),
        opencl: is_mapped("libnvidia-opencl.so"),
    }
}

/// Reads it; `None` where that may not be done, and where it takes too long: then by a thread that goes on
/// by itself, of which there is one at most.
pub fn mapped(proc: &Path, pid: u32) -> Option<Mapped> {
    static BUSY: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    let path = proc.join(pid.to_string()).join("maps");
    let file = File::open(path).ok()?;
    let busy = Arc::clone(BUSY.get_or_init(Arc::default));
    if busy.swap(true, Ordering::AcqRel) {
        return None;
    }
    let (done, result) = mpsc::sync_channel(1);
    let read = {
        let busy = Arc::clone(&busy);
        move || {
            let mut text = Vec::new();
            let outcome = file.take(LONGEST).read_to_end(&mut text);
            busy.store(false, Ordering::Release);
            let _ = done.send(outcome.ok().map(|_| judge(&String::from_utf8_lossy(&text))));
        }
    };
    let thread = std::thread::Builder::new().name("maps".into()).stack_size(128 << 10);
    if thread.spawn(read).is_err() {
        busy.store(false, Ordering::Release);
        return None;
    }
    result.recv_timeout(LIMIT).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shim_that_is_not_mapped_beside_libcuda_was_not_preloaded() {
        let line = |path: &str| {
            format!("7f00-7f01 r-xp 00000000 fe:01 4711                       {path}\n")
        };
        let shim = line(CONTAINER_SHIM);
        let cuda = line("/usr/lib/x86_64-linux-gnu/libcuda.so.550.54");
        let with = |text: &str| judge(text);
        assert_eq!(
            with(&format!("{shim}{cuda}")),
            Mapped { shim: true, cuda: true, opencl: false }
        );
        assert_eq!(with(&cuda), Mapped { cuda: true, ..Mapped::default() });
        let opencl = line("/usr/lib/x86_64-linux-gnu/libnvidia-opencl.so.580.82.07");
        let with_opencl = with(&format!("{shim}{opencl}"));
        assert!(with_opencl.opencl && with_opencl.why().contains("OpenCL"), "{with_opencl:?}");
        assert_eq!(with(&line("/tmp/libtessera.so")), Mapped::default(), "another file");
        assert_eq!(with("7f02-7f03 rw-p 00000000 00:00 0 \n"), Mapped::default());
        assert!(Mapped { cuda: true, ..Mapped::default() }.why().contains("not preloaded"));
    }

    #[test]
    fn of_this_process_it_may_be_read_and_of_no_process_not() {
        assert_eq!(mapped(Path::new("/proc"), std::process::id()), Some(Mapped::default()));
        assert_eq!(mapped(Path::new("/nonexistent"), 1), None);
    }
}
