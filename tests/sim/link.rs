// Shared by the two libraries' build scripts: how a driver library is linked.

/// Gives the library the driver's own SONAME, keeps it loaded (it has thread-local state), and
/// links the unwinder statically, as NVIDIA's libraries do: an image without libgcc_s must do.
fn link_as(soname: &str) {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=../link.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{soname}");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // rustc asks for -lgcc_s: let it find a linker script that names the static archives instead.
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let archive = |name: &str| {
        let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let answer =
            std::process::Command::new(cc).arg(format!("-print-file-name={name}")).output().ok()?;
        let path = String::from_utf8(answer.stdout).ok()?.trim().to_owned();
        std::path::Path::new(&path).is_absolute().then_some(path)
    };
    if let (Some(eh), Some(gcc)) = (archive("libgcc_eh.a"), archive("libgcc.a")) {
        let script = format!("INPUT ( {eh} {gcc} )\n");
        std::fs::write(format!("{out}/libgcc_s.so"), script).expect("OUT_DIR is writable");
        println!("cargo::rustc-link-search=native={out}");
    }
}
