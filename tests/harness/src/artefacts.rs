//! Where the files under test are.

use std::path::{Path, PathBuf};

/// The files that `make debug` leaves behind, checked to exist.
#[derive(Clone, Debug)]
pub struct Artefacts {
    dir: PathBuf,
}

impl Artefacts {
    /// The directory that holds all of them.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The plugin and command line tool.
    pub fn tessera(&self) -> PathBuf {
        self.existing("tessera")
    }

    pub fn shim(&self) -> PathBuf {
        self.existing("libtessera.so")
    }

    /// The configurable inference-like tenant.
    pub fn tenant(&self) -> PathBuf {
        self.existing("tessera-tenant")
    }

    /// The directory with the simulated `libcuda.so.1` and `libnvidia-ml.so.1`.
    pub fn sim_dir(&self) -> PathBuf {
        self.existing("sim")
    }

    /// The simulated driver library.
    pub fn libcuda(&self) -> PathBuf {
        self.existing("sim/libcuda.so.1")
    }

    /// The simulated NVML library.
    pub fn libnvml(&self) -> PathBuf {
        self.existing("sim/libnvidia-ml.so.1")
    }

    /// The tool that injects faults into the simulated machine.
    pub fn simgpu_ctl(&self) -> PathBuf {
        // Cargo puts it beside the other binaries; a copy of the simulator has it beside its libraries.
        let beside_libraries = self.dir.join("sim/simgpu-ctl");
        if beside_libraries.exists() { beside_libraries } else { self.existing("simgpu-ctl") }
    }

    fn existing(&self, name: &str) -> PathBuf {
        let path = self.dir.join(name);
        assert!(
            path.exists(),
            "{} does not exist: run `make debug`, or set TESSERA_ARTEFACTS to where it was built",
            path.display()
        );
        path
    }
}

/// The artefacts that the environment names (`TESSERA_ARTEFACTS`), else `target/debug`.
pub fn artefacts() -> Artefacts {
    let dir = match std::env::var_os("TESSERA_ARTEFACTS") {
        Some(dir) => PathBuf::from(dir),
        None => workspace().join("target/debug"),
    };
    // A relative path would change its meaning in children that run elsewhere.
    let dir = dir.canonicalize().unwrap_or_else(|e| {
        panic!(
            "no artefacts at {} ({e}): run `make debug`, or set TESSERA_ARTEFACTS",
            dir.display()
        )
    });
    Artefacts { dir }
}

/// The repository's root.
pub fn workspace() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.ancestors().nth(2).expect("this crate is tests/harness").to_owned()
}

/// Cargo's target directory, where compiled programs and downloads are kept between runs.
pub fn target_dir() -> PathBuf {
    // A test binary is <target>/<profile>/deps/<name>-<hash>.
    let exe = std::env::current_exe().expect("/proc is mounted");
    exe.ancestors().nth(3).expect("cargo built this test").to_owned()
}
