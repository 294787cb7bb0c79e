//! C programs under `tests/programs`, compiled once per content.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{artefacts, target_dir, workspace};

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
