use std::os::unix::fs::{PermissionsExt, symlink};

use super::super::ContainerEdits;
use super::*;
use crate::shim_install::tests::Mounted;

fn id(n: u8) -> AllocationId {
    AllocationId::of("r", [format!("GPU::{n}").as_str()])
}

fn spec(id: &AllocationId, value: &str) -> Spec {
    Spec::new(id, ContainerEdits { env: vec![format!("A={value}")], ..Default::default() })
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_spec_is_made_in_a_directory_that_was_missing_and_then_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let directory = dir.path().join("run/cdi");
    let (specs, a) = (Specs::new(&directory), id(0));
    assert_eq!(specs.put(&a, &spec(&a, "1")).unwrap(), Put::Made);
    assert_eq!(names(&directory), [format!("tessera.dev-share_{a}.json")]);
    let before = specs.path(&a).metadata().unwrap().modified().unwrap();
    assert_eq!(specs.put(&a, &spec(&a, "1")).unwrap(), Put::Unchanged);
    assert_eq!(specs.path(&a).metadata().unwrap().modified().unwrap(), before);
    assert_eq!(specs.path(&a).metadata().unwrap().permissions().mode() & 0o777, 0o644);
    specs.remove(&a).unwrap();
    specs.remove(&a).unwrap();
    assert_eq!(names(&directory), [""; 0]);
}

#[test]
fn whatever_lies_where_a_spec_belongs_gives_way() {
    let dir = tempfile::tempdir().unwrap();
    let (specs, a) = (Specs::new(dir.path()), id(0));
    let path = specs.path(&a);
    let whole = spec(&a, "1").to_json();
    // Half of one, somebody else's, an unreadable one, an empty directory, a link, a link to itself.
    let elsewhere = dir.path().join("elsewhere");
    std::fs::write(&elsewhere, &whole).unwrap();
    let spoil: [&dyn Fn(); 6] = [
        &|| std::fs::write(&path, &whole[..whole.len() / 2]).unwrap(),
        &|| std::fs::write(&path, b"kind: other.dev/thing").unwrap(),
        &|| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap(),
        &|| {
            std::fs::remove_file(&path).unwrap();
            std::fs::create_dir(&path).unwrap();
        },
        &|| {
            std::fs::remove_file(&path).unwrap();
            symlink(&elsewhere, &path).unwrap();
        },
        &|| {
            std::fs::remove_file(&path).unwrap();
            symlink(&path, &path).unwrap();
        },
    ];
    specs.put(&a, &spec(&a, "1")).unwrap();
    for spoil in spoil {
        spoil();
        assert_eq!(specs.put(&a, &spec(&a, "1")).unwrap(), Put::Replaced);
        assert!(path.symlink_metadata().unwrap().is_file());
        assert_eq!(std::fs::read(&path).unwrap(), whole);
    }
    assert_eq!(std::fs::read(&elsewhere).unwrap(), whole, "what the link led to was not touched");
    assert_eq!(names(dir.path()).len(), 2);
}

#[test]
fn a_directory_with_something_in_it_is_reported_and_left() {
    let dir = tempfile::tempdir().unwrap();
    let (specs, a) = (Specs::new(dir.path()), id(0));
    std::fs::create_dir_all(specs.path(&a).join("theirs")).unwrap();
    let error = specs.put(&a, &spec(&a, "1")).unwrap_err();
    assert!(matches!(error, FileError::Occupied(_)), "{error}");
    assert!(specs.path(&a).join("theirs").is_dir());
}

#[test]
fn a_directory_that_cannot_be_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, b"").unwrap();
    let (specs, a) = (Specs::new(&file.join("cdi")), id(0));
    let error = specs.put(&a, &spec(&a, "1")).unwrap_err();
    assert!(error.to_string().contains("cannot write the CDI spec"), "{error}");
}

#[test]
fn sweeping_takes_ours_that_nobody_wants_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let specs = Specs::new(dir.path());
    let (wanted, stale, foreign) = (id(0), id(1), id(2));
    for id in [&wanted, &stale] {
        specs.put(id, &spec(id, "1")).unwrap();
    }
    // Another's, by content or by name, and what a killed plugin left.
    let theirs = br#"{"cdiVersion":"0.5.0","kind":"other.dev/x","devices":[]}"#;
    std::fs::write(specs.path(&foreign), theirs).unwrap();
    std::fs::write(dir.path().join("nvidia.yaml"), b"kind: nvidia.com/gpu").unwrap();
    std::fs::write(dir.path().join("tessera.dev-share_x.json"), b"{}").unwrap();
    std::fs::write(dir.path().join(format!(".tessera.dev-share_{wanted}.json.1-0.new")), b"{")
        .unwrap();
    assert_eq!(specs.sweep(|id| *id == wanted), [stale]);
    let mut left = [
        "nvidia.yaml".to_owned(),
        "tessera.dev-share_x.json".to_owned(),
        format!("tessera.dev-share_{wanted}.json"),
        format!("tessera.dev-share_{foreign}.json"),
    ];
    left.sort();
    assert_eq!(names(dir.path()), left);
    // Nothing to do is nothing to do.
    assert!(Specs::new(&dir.path().join("absent")).sweep(|_| false).is_empty());
}

#[test]
fn a_full_or_read_only_directory_is_reported_and_keeps_what_was_there() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mounted) = Mounted::tmpfs(dir.path(), "size=16k") else {
        return eprintln!("not run: no file system can be mounted here");
    };
    let (specs, a) = (Specs::new(dir.path()), id(0));
    specs.put(&a, &spec(&a, "1")).unwrap();
    let whole = std::fs::read(specs.path(&a)).unwrap();
    let error = specs.put(&a, &spec(&a, &"x".repeat(64 << 10))).unwrap_err();
    assert!(matches!(error, FileError::Full(_)), "{error}");
    assert_eq!(std::fs::read(specs.path(&a)).unwrap(), whole);
    assert_eq!(names(dir.path()).len(), 1, "half a spec is left");
    mounted.make_read_only();
    assert_eq!(specs.put(&a, &spec(&a, "1")).unwrap(), Put::Unchanged, "it is there");
    let error = specs.put(&a, &spec(&a, "2")).unwrap_err();
    assert!(matches!(error, FileError::ReadOnly(_)), "{error}");
    assert_eq!(std::fs::read(specs.path(&a)).unwrap(), whole);
}
