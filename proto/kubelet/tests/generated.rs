//! The committed code under `src/gen` is what the `.proto` files generate.

use std::fs;
use std::path::Path;

/// Generates the code of one `.proto` file. Each is compiled alone: kubelet's APIs share proto
/// package names (`v1`), which would otherwise run into one Rust file.
fn generate(proto: &str, package: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let descriptors =
        protox::compile([format!("{proto}.proto")], [root.join("proto")]).expect("valid proto");
    let out = tempfile::tempdir().expect("temporary directory");
    tonic_prost_build::configure()
        .btree_map(".")
        .out_dir(out.path())
        .compile_fds(descriptors)
        .expect("code generation");
    fs::read_to_string(out.path().join(format!("{package}.rs"))).expect("generated file")
}

#[test]
fn committed_code_equals_generated_code() {
    let generated = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/gen");
    for (proto, package) in [
        ("deviceplugin_v1beta1", "v1beta1"),
        ("podresources_v1", "v1"),
        ("pluginregistration_v1", "pluginregistration"),
        ("admin_v1", "tessera.admin.v1"),
        ("dra_v1", "k8s.io.kubelet.pkg.apis.dra.v1"),
        ("dra_v1beta1", "k8s.io.kubelet.pkg.apis.dra.v1beta1"),
        ("dra_health_v1", "v1"),
        ("dra_health_v1alpha1", "v1alpha1"),
    ] {
        let fresh = generate(proto, package);
        let path = generated.join(format!("{proto}.rs"));
        if std::env::var_os("TESSERA_REGENERATE").is_some() {
            fs::write(&path, &fresh).expect("write generated code");
            continue;
        }
        let committed = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            committed == fresh,
            "{} is not what proto/{proto}.proto generates; run \
             `TESSERA_REGENERATE=1 cargo test -p tessera-kubelet-api --test generated` and commit",
            path.display()
        );
    }
}
