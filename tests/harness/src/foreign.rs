//! C libraries other than this machine's, unpacked from Debian packages and not installed: musl, and
//! glibc from before 2.34, which moved libdl and libpthread into libc.

use std::path::{Path, PathBuf};

use crate::{CProgram, external};

/// A C library to compile programs against and to run them on.
#[derive(Clone, Debug)]
pub struct ForeignLibc {
    flags: Vec<String>,
}

impl ForeignLibc {
    /// musl, as the thing of this name (`tests/setup`) has it. The error says why it can't be had.
    pub fn musl(thing: &str) -> Result<Self, String> {
        // Headers and start files of another version serve; what counts is what runs.
        let development = external::fetched("musl-dev")?;
        let root = external::fetched(thing)?;
        let library = ["lib", "usr/lib"]
            .map(|lib| root.join(lib).join("x86_64-linux-musl/libc.so"))
            .into_iter()
            .find(|library| library.is_file())
            .ok_or("no libc.so in Debian's musl package")?;
        // As musl-gcc's, which knows absolute paths only.
        let include = development.join("usr/include/x86_64-linux-musl");
        let lib = development.join("usr/lib/x86_64-linux-musl");
        let specs = format!(
            "%rename cpp_options old_cpp_options\n\n\
             *cpp_options:\n-nostdinc -isystem {include} -isystem include%s %(old_cpp_options)\n\n\
             *cc1:\n%(cc1_cpu) -nostdinc -isystem {include} -isystem include%s\n\n\
             *link_libgcc:\n-L{dir} -L{lib} -L .%s\n\n\
             *libgcc:\nlibgcc.a%s %:if-exists(libgcc_eh.a%s)\n\n\
             *startfile:\n%{{!shared: {lib}/Scrt1.o}} {lib}/crti.o crtbeginS.o%s\n\n\
             *endfile:\ncrtendS.o%s {lib}/crtn.o\n\n\
             *link:\n-dynamic-linker {library} -nostdlib %{{shared:-shared}}\n\n\
             *esp_link:\n\n\n*esp_options:\n\n\n*esp_cpp_options:\n\n\n",
            include = include.display(),
            lib = lib.display(),
            dir = library.parent().expect("a file's directory").display(),
            library = library.display(),
        );
        let path = root.join(".specs");
        publish(&path, &specs);
        Ok(Self { flags: vec![format!("-specs={}", path.display())] })
    }

    /// A glibc from before 2.34. The error says why it can't be had.
    pub fn old_glibc() -> Result<Self, String> {
        let root = external::fetched("old-glibc")?;
        let lib = root.join("lib/x86_64-linux-gnu");
        let loader = root.join("lib64/ld-linux-x86-64.so.2");
        if !loader.is_file() {
            return Err("no dynamic linker in Debian's libc6 package".to_owned());
        }
        Ok(Self {
            flags: vec![
                format!("--sysroot={}", root.display()),
                format!("-B{}", root.join("usr/lib/x86_64-linux-gnu").display()),
                format!("-Wl,-dynamic-linker,{}", loader.display()),
                format!("-Wl,-rpath,{}", lib.display()),
            ],
        })
    }

    /// `program`, compiled against this library and to be run on it.
    #[must_use]
    pub fn compile(&self, program: CProgram) -> PathBuf {
        self.flags.iter().fold(program, |program, flag| program.flag(flag)).build()
    }
}

/// Writes a file whole or not at all: tests run in parallel processes.
fn publish(path: &Path, content: &str) {
    let dir = path.parent().expect("a file's directory");
    let file = tempfile::NamedTempFile::new_in(dir).expect("the target directory is writable");
    std::fs::write(file.path(), content).expect("the target directory is writable");
    file.persist(path).expect("same file system");
}
