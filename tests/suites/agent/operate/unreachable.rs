//! Commands that ask the plugin, where it cannot be asked: each reason has a sentence with what to do and an exit
//! status.

use std::os::unix::fs::PermissionsExt;
use std::process::Output;

use tessera_harness::plugin::{Simulated, stderr, tessera, until};

/// Every command that asks the plugin.
const ASKING: &[&[&str]] = &[
    &["status"],
    &["status", "--ready"],
    &["status", "--live"],
    &["top", "--once"],
    &["explain", "some-pod"],
    &["quota", "show"],
    &["quota", "set", "some-pod", "--memory", "1Gi"],
    &["quota", "reset", "some-pod"],
    &["cordon", "0"],
    &["uncordon", "--all"],
    &["config", "reload"],
    &["history"],
    &["recommend"],
    &["waste"],
    &["trace", "-o", "-"],
];

/// All that it wrote, without the ends of lines that the width made.
fn said(output: &Output) -> String {
    let all = String::from_utf8_lossy(&output.stdout).into_owned() + &stderr(output);
    all.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn file(dir: &std::path::Path) -> std::path::PathBuf {
    let at = |name: &str| dir.join(name).display().to_string();
    let file = dir.join("config.toml");
    let text = format!(
        "[paths]\nadmin = \"{}\"\nledger = \"{}\"\npages = \"{}\"\n",
        at("run/admin.sock"),
        at("ledger.redb"),
        at("pages")
    );
    std::fs::write(&file, text).unwrap();
    std::fs::create_dir_all(dir.join("run")).unwrap();
    file
}

#[test]
fn each_command_says_why_the_plugin_is_not_reached_and_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let file = file(dir.path());
    let each = |part: &str| {
        for args in ASKING {
            let output = tessera().arg("-c").arg(&file).args(*args).output().unwrap();
            let text = said(&output);
            assert_eq!(output.status.code(), Some(69), "{args:?}: {text}");
            // Some begin a sentence with it.
            assert!(
                text.to_lowercase().contains(part) && text.contains("kubectl"),
                "{args:?}: {text}"
            );
            for wrong in ["os error", "pid 0", "nothing is called"] {
                assert!(!text.contains(wrong), "{wrong}: {args:?}: {text}");
            }
        }
    };
    // Nothing has ever run here. Whether there are GPUs is the machine's affair.
    each("this machine");
    // It has, and does not now.
    std::fs::create_dir_all(dir.path().join("pages/x")).unwrap();
    each("so it is not running");
    drop(std::os::unix::net::UnixListener::bind(dir.path().join("run/admin.sock")).unwrap());
    each("nobody listens at");
}

#[test]
fn a_user_that_may_not_ask_is_refused_with_77() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("not run: only root can become somebody who may not");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = file(dir.path());
    let open = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    open(dir.path(), 0o755);
    open(&dir.path().join("run"), 0o700);
    // The program lies where another user may not go.
    let program = dir.path().join("tessera");
    std::fs::copy(tessera_harness::artefacts().tessera(), &program).unwrap();
    for args in ASKING {
        let mut command = std::process::Command::new(&program);
        std::os::unix::process::CommandExt::uid(&mut command, 1000);
        let output = command.arg("-c").arg(&file).args(*args).output().unwrap();
        let text = said(&output);
        assert_eq!(output.status.code(), Some(77), "{args:?}: {text}");
        let reported = text.contains("permission denied: only root may ask")
            || text.contains("Permission denied: only root may ask");
        assert!(reported && text.contains("uid 1000") && text.contains("sudo"), "{args:?}: {text}");
    }
}

#[tokio::test]
async fn a_node_whose_gpus_are_all_left_out_says_so_with_those_that_there_are() {
    let mut node = Simulated::on("", "include = [\"GPU-nowhere\"]").await;
    let check = node.run(&["config", "check"]);
    let reported = said(&check);
    assert_eq!(check.status.code(), Some(1), "{reported}");
    assert!(
        reported.contains("warning: nothing would be sold here") && reported.contains("GPU 0 ("),
        "{reported}"
    );
    assert!(!reported.ends_with(" ok"), "{reported}");
    node.launch();
    let output = until(|| {
        let output = node.run(&["status"]);
        let text = said(&output);
        let leaves_none = text.contains("gpus.include and gpus.exclude leave none");
        (text.contains("No GPUs") && leaves_none).then_some(output)
    })
    .await;
    assert_eq!(output.status.code(), Some(69), "{}", said(&output));
}

#[test]
fn a_console_with_a_wrong_kubeconfig_ends_and_names_the_field() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("kubeconfig");
    let text = "\
        apiVersion: v1\n\
        kind: Config\n\
        current-context: c\n\
        contexts: [{name: c, context: {cluster: c, user: u}}]\n\
        clusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]\n\
        users: [{name: u, user: {tokenFile: /nowhere/token}}]\n";
    std::fs::write(&file, text).unwrap();
    let output = tessera()
        .args(["console", "--listen", "127.0.0.1:0", "--kubeconfig"])
        .arg(&file)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(64), "{}", stderr(&output));
    assert!(stderr(&output).contains("tokenFile"), "{}", stderr(&output));
}

#[test]
fn a_file_that_is_not_there_is_named_and_no_other() {
    for args in [&["config", "check", "/nope.toml"][..], &["-c", "/nope.toml", "config", "check"]] {
        let output = tessera().args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(64));
        let want = "/nope.toml: there is no such file; `tessera config default` prints one to begin with\n";
        assert_eq!(stderr(&output), want);
    }
}
