//! The committed code under `src/gen` is what the `.proto` file generates.

use std::fs;
use std::path::Path;

#[test]
fn committed_code_equals_generated_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let descriptors =
        protox::compile(["pipeline.proto"], [root.join("proto")]).expect("valid proto");
    let out = tempfile::tempdir().expect("temporary directory");
    tonic_prost_build::configure().out_dir(out.path()).compile_fds(descriptors).expect("code");
    let fresh = fs::read_to_string(out.path().join("tessera.pipeline.rs")).expect("generated file");
    let path = root.join("src/gen/pipeline.rs");
    if std::env::var_os("TESSERA_REGENERATE").is_some() {
        fs::write(&path, &fresh).expect("write generated code");
        return;
    }
    assert!(
        fs::read_to_string(&path).unwrap_or_default() == fresh,
        "src/gen/pipeline.rs is not what proto/pipeline.proto generates; run \
         `TESSERA_REGENERATE=1 cargo test -p tessera-pipeline --test generated` and commit"
    );
}
