//! Freezing a process as container runtimes do: by its control group, version 2 (`cgroup.freeze`) or 1
//! (the freezer controller), whichever this machine has and lets us use. Unlike a stopped process a
//! frozen one gets no signal, and nobody is notified.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::PATIENCE;

/// A control group with one process in it. Dropping it thaws the process and puts it back.
#[derive(Debug)]
pub struct Freezer {
    dir: PathBuf,
    pid: u32,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Unified,
    Legacy,
}

impl Kind {
    /// The file that is written, and what to.
    fn switch(self, freeze: bool) -> (&'static str, &'static str) {
        match (self, freeze) {
            (Self::Unified, true) => ("cgroup.freeze", "1"),
            (Self::Unified, false) => ("cgroup.freeze", "0"),
            (Self::Legacy, true) => ("freezer.state", "FROZEN"),
            (Self::Legacy, false) => ("freezer.state", "THAWED"),
        }
    }

    /// The file that tells, and the line in it.
    fn sign(self, frozen: bool) -> (&'static str, &'static str) {
        match (self, frozen) {
            (Self::Unified, true) => ("cgroup.events", "frozen 1"),
            (Self::Unified, false) => ("cgroup.events", "frozen 0"),
            (Self::Legacy, true) => ("freezer.state", "FROZEN"),
            (Self::Legacy, false) => ("freezer.state", "THAWED"),
        }
    }
}

impl Freezer {
    /// A group for this process alone; the error says why there can be none.
    pub fn of(pid: u32) -> Result<Self, String> {
        let mut reasons = Vec::new();
        for (kind, base) in groups() {
            match Self::below(&base, kind, pid) {
                Ok(freezer) => return Ok(freezer),
                Err(reason) => reasons.push(reason),
            }
        }
        match reasons.is_empty() {
            true => Err("no cgroup v2 and no freezer of v1 is mounted".to_owned()),
            false => Err(reasons.join("; ")),
        }
    }

    fn below(base: &Path, kind: Kind, pid: u32) -> Result<Self, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let serial = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = base.join(format!("tessera-test-{}-{serial}", std::process::id()));
        fs::create_dir(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        let freezer = Self { dir, pid, kind };
        freezer.write("cgroup.procs", &pid.to_string())?;
        let (file, _) = kind.switch(true);
        match freezer.dir.join(file).exists() {
            true => Ok(freezer),
            false => Err(format!("{} has no {file}", freezer.dir.display())),
        }
    }

    fn write(&self, file: &str, text: &str) -> Result<(), String> {
        let path = self.dir.join(file);
        fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Returns when the process runs no more.
    pub fn freeze(&self) {
        self.set(true);
    }

    /// Returns when it may run again.
    pub fn thaw(&self) {
        self.set(false);
    }

    fn set(&self, frozen: bool) {
        let (file, word) = self.kind.switch(frozen);
        self.write(file, word).expect("it could be made");
        let (file, line) = self.kind.sign(frozen);
        let begun = Instant::now();
        while !fs::read_to_string(self.dir.join(file)).expect("readable").lines().any(|l| l == line)
        {
            assert!(begun.elapsed() < PATIENCE, "{} never says {line}", self.dir.display());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let (file, word) = self.kind.switch(false);
        let _ = self.write(file, word);
        if let Some(base) = self.dir.parent() {
            // It may have ended.
            let _ = fs::write(base.join("cgroup.procs"), self.pid.to_string());
        }
        // A process that has just left, or ended, keeps it for a moment.
        let begun = Instant::now();
        while fs::remove_dir(&self.dir).is_err() && begun.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Where groups can be made: this process's own of each hierarchy that can freeze.
fn groups() -> Vec<(Kind, PathBuf)> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let own_of = |is_it: &dyn Fn(&str, &str) -> bool| {
        own.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            is_it(number, controllers).then(|| path.trim_start_matches('/').to_owned())
        })
    };
    let group = |line: &str| {
        let mut fields = line.split(' ');
        let (_, at, kind, options) =
            (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let lists = |list: &str, word: &str| list.split(',').any(|one| one == word);
        let (kind, own) = match kind {
            "cgroup2" => (Kind::Unified, own_of(&|number, _| number == "0")),
            "cgroup" if lists(options, "freezer") => {
                (Kind::Legacy, own_of(&|_, controllers| lists(controllers, "freezer")))
            }
            _ => return None,
        };
        let at = Path::new(at);
        let own = own.map(|own| at.join(own)).filter(|own| own.is_dir());
        Some((kind, own.unwrap_or_else(|| at.to_owned())))
    };
    mounts.lines().filter_map(group).collect()
}
