//! In one process: flock(2) is a description's, not a process's.

use super::*;

#[test]
fn a_directory_is_had_once_by_whatever_path_and_again_after_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("a/pages");
    let hold = DirectoryLock::take(&pages, "the first").unwrap();
    std::os::unix::fs::symlink(&pages, dir.path().join("link")).unwrap();
    for path in [pages.clone(), dir.path().join("link"), dir.path().join("a/../a/pages")] {
        let error = locked(&path).unwrap_err().to_string();
        let pid = std::process::id();
        assert!(error.contains(&format!("pid {pid} (")), "{error}");
        assert!(error.contains("it says: pid") && error.contains("the first"), "{error}");
    }
    drop(hold);
    assert_eq!(std::fs::read_dir(&pages).unwrap().count(), 0, "nothing is left");
    drop(DirectoryLock::take(&pages, "the second").unwrap());
}

#[test]
fn one_that_ends_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let hold = DirectoryLock::take(dir.path(), "").unwrap();
    let ending = std::thread::spawn(move || {
        std::thread::sleep(STEP * 5);
        drop(hold);
    });
    DirectoryLock::take(dir.path(), "").unwrap();
    ending.join().unwrap();
}

#[test]
fn another_directory_in_its_place_is_taken_too() {
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("pages");
    let hold = DirectoryLock::take(&pages, "").unwrap();
    hold.renew().unwrap();
    std::fs::remove_dir_all(&pages).unwrap();
    hold.renew().unwrap();
    std::fs::create_dir(&pages).unwrap();
    assert!(locked(&pages).is_ok(), "nobody's yet");
    hold.renew().unwrap();
    assert!(matches!(locked(&pages), Err(DirectoryLockError::InUse { .. })));
    // Somebody was faster.
    std::fs::remove_dir_all(&pages).unwrap();
    std::fs::create_dir(&pages).unwrap();
    let other = locked(&pages).unwrap();
    assert!(matches!(hold.renew(), Err(DirectoryLockError::InUse { .. })));
    drop(other);
    hold.renew().unwrap();
}

#[test]
fn what_cannot_be_made_names_the_key() {
    let error = DirectoryLock::take(Path::new("/dev/null/pages"), "").unwrap_err().to_string();
    assert!(error.starts_with("paths.pages /dev/null/pages: "), "{error}");
}
