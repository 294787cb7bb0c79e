//! Two plugins and one pages directory.

use std::process::Stdio;

use tessera_harness::plugin::{GPU, Simulated, bounded, stderr, until};

/// A configuration that differs from the node's own in ledger and admin socket, and has these pages.
fn other(node: &Simulated, pages: &str) -> std::path::PathBuf {
    let text = std::fs::read_to_string(node.file()).unwrap();
    let at = |name: &str| node.dir.path().join(name).display().to_string();
    let text = text
        .replace(&at("ledger.redb"), &at("other.redb"))
        .replace(&at("admin.sock"), &at("other.sock"))
        .replace(&format!("pages = \"{}\"", at("pages")), &format!("pages = \"{pages}\""));
    let file = node.dir.path().join("other.toml");
    std::fs::write(&file, text).unwrap();
    file
}

fn second(node: &Simulated, pages: &str) -> std::process::Output {
    let file = other(node, pages);
    let mut command = node.on_machine(std::process::Command::new(&node.program));
    let child = command.arg("--config").arg(file).arg("serve").stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap();
    for _ in 0..1200 {
        if child.try_wait().unwrap().is_some() {
            return child.wait_with_output().unwrap();
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    child.kill().unwrap();
    panic!("it serves: {}", stderr(&child.wait_with_output().unwrap()));
}

#[tokio::test]
async fn a_second_plugin_on_the_same_pages_ends_and_names_the_first() {
    let mut node = Simulated::new("replicas = 4").await;
    node.serve().await;
    node.start_pod("a", 1).await;
    let registrations = node.kubelet.registrations();
    let pid = node.plugin.as_ref().unwrap().id().to_string();
    let pages = node.dir.path().join("pages");
    // However the path is written: it is the directory that counts.
    let link = node.dir.path().join("link");
    std::os::unix::fs::symlink(&pages, &link).unwrap();
    let dotted = node.dir.path().join("kubelet/../pages");
    for path in [&pages, &link, &dotted] {
        let output = second(&node, &path.display().to_string());
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("paths.pages") && text.contains("another Tessera plugin"), "{text}");
        assert!(text.contains(&format!("pid {pid}")), "{text}");
        assert!(text.contains("tessera") && text.contains("stop it"), "{text}");
    }
    assert_eq!(node.kubelet.registrations(), registrations, "the second takes nothing");
    // The first goes on.
    node.start_pod("b", 1).await;
    let status = node.json();
    let warnings = status["warnings"].as_array().unwrap();
    let flagged = |text: &serde_json::Value| text.as_str().unwrap().contains("outside");
    assert!(!warnings.iter().any(flagged), "{status:#}");
}

/// Killed or terminated: the next one starts at once, and running pods are not touched.
#[tokio::test]
async fn the_next_plugin_has_the_pages_as_soon_as_the_one_before_is_gone() {
    let mut node = Simulated::new("replicas = 4").await;
    node.serve().await;
    let ids = node.start_pod("a", 1).await.ids;
    for round in 0..6 {
        match round % 2 {
            0 => node.kill(),
            _ => assert_eq!(node.terminate().await, Some(0)),
        }
        let lists = node.kubelet.lists();
        node.launch();
        bounded(node.kubelet.wait_until(|kubelet| kubelet.lists() > lists)).await;
        let id = tessera_harness::plugin::id_of(&ids).to_string();
        let status = node.json();
        assert!(status["allocations"].as_array().unwrap().iter().any(|a| a["id"] == id.as_str()));
    }
    assert_eq!(node.kubelet.allocatable(GPU), 8);
}

/// One that starts while the other still ends waits a moment instead of giving up.
#[tokio::test]
async fn a_plugin_that_starts_while_the_one_before_ends_takes_over() {
    let mut node = Simulated::new("replicas = 4").await;
    node.serve().await;
    let before = node.plugin.take().unwrap();
    let lists = node.kubelet.lists();
    let file = other(&node, &node.dir.path().join("pages").display().to_string());
    let mut command = node.on_machine(std::process::Command::new(&node.program));
    let log = std::fs::File::create(node.dir.path().join("second")).unwrap();
    command.arg("--config").arg(file).arg("serve").stderr(log).stdin(Stdio::null());
    let pid = nix::unistd::Pid::from_raw(i32::try_from(before.id()).unwrap());
    node.plugin = Some(command.spawn().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    let mut before = before;
    until(|| before.try_wait().unwrap()).await;
    bounded(node.kubelet.wait_until(|kubelet| kubelet.lists() > lists)).await;
}

/// Pages that are removed as a whole are made again; the second is kept out of the new ones as well.
#[tokio::test]
async fn a_pages_directory_that_was_removed_and_made_again_is_still_the_firsts() {
    let mut node = Simulated::new("replicas = 4").await;
    node.serve().await;
    let pages = node.dir.path().join("pages");
    std::fs::remove_dir_all(&pages).unwrap();
    node.start_pod("a", 1).await;
    until(|| {
        // Held by a lock on the directory: nobody else gets it.
        let file = std::fs::File::open(&pages).ok()?;
        file.try_lock().is_err().then_some(())
    })
    .await;
    let output = second(&node, &pages.display().to_string());
    assert!(stderr(&output).contains("another Tessera plugin"), "{}", stderr(&output));
}
