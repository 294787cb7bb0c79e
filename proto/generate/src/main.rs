//! Generates the Rust code that is committed beside the `.proto` files, and notes the checksums of both, which
//! `make lint` compares: `cargo run --manifest-path proto/generate/Cargo.toml`.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Directory of a crate, name of a file in its `proto`, and the package that the file declares.
const PROTOS: [(&str, &str, &str); 6] = [
    ("proto/kubelet", "deviceplugin_v1beta1", "v1beta1"),
    ("proto/kubelet", "dra_health_v1", "v1"),
    ("proto/kubelet", "dra_health_v1alpha1", "v1alpha1"),
    ("proto/kubelet", "dra_v1", "k8s.io.kubelet.pkg.apis.dra.v1"),
    ("proto/kubelet", "pluginregistration_v1", "pluginregistration"),
    ("proto/kubelet", "podresources_v1", "v1"),
];

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).ok_or("no repository")?;
    let mut files = Vec::new();
    // Each is compiled alone: kubelet's APIs share package names (`v1`), which would run into one Rust file.
    for (directory, name, package) in PROTOS {
        let source = format!("{directory}/proto/{name}.proto");
        let generated = format!("{directory}/src/gen/{name}.rs");
        let descriptors =
            protox::compile([format!("{name}.proto")], [root.join(directory).join("proto")])?;
        let out = tempfile::tempdir()?;
        tonic_prost_build::configure()
            .btree_map(".")
            .out_dir(out.path())
            .compile_fds(descriptors)?;
        fs::copy(out.path().join(format!("{package}.rs")), root.join(&generated))?;
        files.extend([source, generated]);
    }
    let sums = Command::new("sha256sum").args(files).current_dir(root).output()?;
    if !sums.status.success() {
        return Err(String::from_utf8_lossy(&sums.stderr).into());
    }
    fs::write(root.join("proto/generate/sha256"), sums.stdout)?;
    Ok(())
}
