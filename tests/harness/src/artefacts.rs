//! Where the files under test are.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The files that `make debug` leaves behind, checked to exist.
#[derive(Clone, Debug)]
pub struct Artefacts {
    /// The directory that holds all of them.
    pub dir: PathBuf,
}

impl Artefacts {
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

// C programs under `tests/programs`, compiled once per content.

/// How a program under `tests/programs` is compiled.
#[derive(Clone, Debug)]
pub struct CProgram {
    name: String,
    flags: Vec<String>,
    libraries: Vec<String>,
}

impl CProgram {
    /// `tests/programs/<name>.c` as an executable that finds the driver with `dlopen`.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), flags: Vec::new(), libraries: Vec::new() }
    }

    /// Links the driver library, so that the program has it as NEEDED and calls it through the PLT,
    /// as the CUDA runtime's static form and most C programs do.
    pub fn links_driver(mut self) -> Self {
        self.libraries.push(artefacts().libcuda().display().to_string());
        self
    }

    /// A shared library instead of an executable.
    pub fn shared(self) -> Self {
        self.flag("-shared").flag("-fPIC")
    }

    /// A further flag for the compiler.
    pub fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    /// Compiles, unless the same source was compiled with the same flags before.
    pub fn build(&self) -> PathBuf {
        let programs = workspace().join("tests/programs");
        let source = programs.join(format!("{}.c", self.name));
        let out_dir = target_dir().join("test-programs");
        std::fs::create_dir_all(&out_dir).expect("the target directory is writable");
        let out = out_dir.join(format!("{}-{:016x}", self.name, self.fingerprint(&programs)));
        if out.exists() {
            return out;
        }
        // Tests run in parallel processes: the first publishes, by rename.
        let scratch = tempfile::Builder::new()
            .prefix(&format!(".{}", self.name))
            .tempdir_in(&out_dir)
            .expect("the target directory is writable");
        let built = scratch.path().join("out");
        let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        cc.args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"])
            .arg(&programs)
            .args(&self.flags)
            .arg("-o")
            .arg(&built)
            .arg(&source)
            // The artefacts may be rebuilt without one of the symbols that another program uses.
            .arg("-Wl,--allow-shlib-undefined")
            .args(&self.libraries)
            .args(["-ldl", "-lm"]);
        let made = cc.output().unwrap_or_else(|e| panic!("cannot run the C compiler: {e}"));
        assert!(
            made.status.success(),
            "{} does not compile:\n{}",
            source.display(),
            String::from_utf8_lossy(&made.stderr)
        );
        std::fs::rename(&built, &out).expect("same file system");
        out
    }

    /// Over everything that decides what the compiler makes: sources, headers, flags.
    fn fingerprint(&self, programs: &Path) -> u64 {
        let mut hasher = DefaultHasher::new();
        let mut sources: Vec<PathBuf> = std::fs::read_dir(programs)
            .expect("tests/programs is there")
            .map(|entry| entry.expect("readable").path())
            .filter(|path| {
                path.extension().is_some_and(|e| e == "h")
                    || path.file_stem().is_some_and(|stem| *stem == *self.name)
            })
            .collect();
        sources.sort();
        for path in sources {
            std::fs::read(&path).expect("a readable source").hash(&mut hasher);
        }
        (&self.flags, &self.libraries).hash(&mut hasher);
        hasher.finish()
    }
}

/// Compiles `tests/programs/<name>.c` to an executable that finds the driver with `dlopen`.
pub fn compile_c(name: &str) -> PathBuf {
    CProgram::new(name).build()
}

/// Copies a program, by another: while this process wrote it, children that are being started would have it open (ETXTBSY).
pub fn copy(program: &Path, to: &Path) {
    let copied = std::process::Command::new("cp").arg(program).arg(to).status();
    assert!(copied.expect("cp starts").success());
}
