//! Calls that the library makes to its own exports can be interposed, as NVIDIA's can.

use std::path::Path;
use std::process::Command;

const INTERPOSER: &str = r#"
#include <string.h>
struct memory { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory *out) {
    (void)device;
    out->total = 1000, out->reserved = 100, out->free = 700, out->used = 200;
    return 0;
}
"#;

const PROGRAM: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv) {
    (void)argc;
    void *lib = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!lib) return puts(dlerror()), 2;
    int (*init)(void) = (int (*)(void))dlsym(lib, "nvmlInit_v2");
    int (*by_index)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(lib, "nvmlDeviceGetHandleByIndex_v2");
    int (*memory)(void *, unsigned long long *) = (int (*)(void *, unsigned long long *))dlsym(lib, "nvmlDeviceGetMemoryInfo");
    void *device;
    unsigned long long m[3];
    if (init() || by_index(0, &device) || memory(device, m)) return 3;
    printf("total %llu free %llu used %llu\n", m[0], m[1], m[2]);
    return 0;
}
"#;

fn compile(dir: &Path, name: &str, text: &str, flags: &[&str]) -> std::path::PathBuf {
    let source = dir.join(format!("{name}.c"));
    std::fs::write(&source, text).unwrap();
    let out = dir.join(name);
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let status = Command::new(cc).arg("-o").arg(&out).arg(&source).args(flags).status().unwrap();
    assert!(status.success(), "cannot compile {name}");
    out
}

#[test]
fn an_interposed_function_sees_the_librarys_own_calls() {
    let dir = tempfile::tempdir().unwrap();
    let library = std::env::current_exe().unwrap().with_file_name("libsimnvml.so");
    let program = compile(dir.path(), "program", PROGRAM, &["-ldl"]);
    let interposer = compile(dir.path(), "interposer.so", INTERPOSER, &["-shared", "-fPIC"]);
    let run = |preload: Option<&Path>| {
        let mut command = Command::new(&program);
        command.arg(&library).env("SIMGPU_STATE", dir.path().join("state"));
        command.env_remove("SIMGPU_CONFIG");
        if let Some(preload) = preload {
            command.env("LD_PRELOAD", preload);
        }
        let out = command.output().unwrap();
        assert!(out.status.success(), "{out:?}");
        String::from_utf8(out.stdout).unwrap()
    };
    assert_eq!(run(None), "total 17179869184 free 16445865984 used 734003200\n");
    assert_eq!(run(Some(&interposer)), "total 1000 free 700 used 300\n");
}
