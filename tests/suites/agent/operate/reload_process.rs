//! The configuration's file and the plugin as a process: signals, restarts, and the commands.

use std::io::Write;
use std::process::Stdio;

use serde_json::Value;
use tessera_harness::plugin::{GPU, Simulated, bounded, stderr, until};

fn hang_up(node: &Simulated) {
    let pid = i32::try_from(node.plugin.as_ref().unwrap().id()).unwrap();
    let pid = nix::unistd::Pid::from_raw(pid);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGHUP).unwrap();
}

fn configuration(node: &Simulated) -> Value {
    node.json()["plugin"]["configuration"].clone()
}

#[tokio::test]
async fn a_plugin_that_starts_with_a_bad_file_goes_on_with_the_last_good_one() {
    let mut node = Simulated::serving().await;
    node.start_pod("a", 1).await;
    let good = configuration(&node)["hash"].clone();
    // A fraction of a GPU too many, and then not even TOML: as kubelet restarts it with both.
    for (from, to) in [("replicas = 4", "replicas = 4\nmemory = \"70Gi\""), ("[share]", "[share")] {
        node.configure(from, to);
        assert_eq!(node.terminate().await, Some(0));
        node.serve().await;
        bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
        let state = configuration(&node);
        assert_eq!(state["hash"], good);
        assert!(!state["errors"].as_array().unwrap().is_empty(), "{state}");
        assert!(node.run(&["status", "--ready"]).status.success(), "probes need no good file");
        let reloaded = node.run(&["config", "reload"]);
        assert_eq!(reloaded.status.code(), Some(64), "{}", stderr(&reloaded));
    }
    // Without a last good one there is nothing to start with.
    node.terminate().await;
    let kept = node.dir.path().join("ledger.redb.config.toml");
    std::fs::remove_file(kept).unwrap();
    let refused = node.run(&["serve"]);
    assert_eq!(refused.status.code(), Some(64));
    assert!(stderr(&refused).contains("config.toml:1: "), "{}", stderr(&refused));
}

/// Whose ledger is not the default one, so that the file has to say where it is.
#[tokio::test]
async fn a_plugin_whose_file_cannot_be_read_goes_on_with_the_last_good_one() {
    let mut node = Simulated::serving().await;
    let good = configuration(&node)["hash"].clone();
    let file = node.file();
    let aside = node.dir.path().join("aside");
    let breaks: [&dyn Fn(); 4] = [
        &|| std::fs::rename(&file, &aside).unwrap(),
        &|| std::fs::create_dir(&file).unwrap(),
        &|| std::fs::write(&file, b"\xff\xfe").unwrap(),
        &|| std::fs::write(&file, "[paths\nledger").unwrap(),
    ];
    for (n, damage) in breaks.into_iter().enumerate() {
        assert_eq!(node.terminate().await, Some(0));
        if file.is_dir() {
            std::fs::remove_dir(&file).unwrap();
        }
        damage();
        node.serve().await;
        bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
        assert_eq!(configuration(&node)["hash"], good, "{n}");
    }
}

#[tokio::test]
async fn sighup_and_the_command_have_the_file_read_again() {
    let mut node = Simulated::serving().await;
    node.configure("replicas = 4", "replicas = 8");
    hang_up(&node);
    bounded(node.kubelet.wait_allocatable(GPU, 16)).await;
    node.configure("replicas = 8", "replicas = 2\n[log]\nfilter = \"debug\"\nformat = \"json\"");
    let answer = node.run(&["config", "reload", "-o", "json"]);
    assert_eq!(answer.status.code(), Some(0), "{}", stderr(&answer));
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    // The file's own news may have come first.
    assert!(answer["configuration"]["errors"].as_array().unwrap().is_empty(), "{answer}");
    assert_eq!(answer["configuration"]["waiting_keys"], serde_json::json!(["log.format"]));
    let log = std::fs::read_to_string(node.dir.path().join("log")).unwrap();
    assert!(log.contains("DEBUG"), "the filter took effect: {log}");
    assert_eq!(node.terminate().await, Some(0));
    let away = node.run(&["config", "reload"]);
    assert_eq!(away.status.code(), Some(69), "{}", stderr(&away));
}

#[tokio::test]
async fn a_plan_tells_what_would_change_and_changes_nothing() {
    let mut node = Simulated::new("replicas = 4\nmemory = \"2Gi\"").await;
    node.serve().await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    node.start_pod("a", 1).await;
    until(|| (!node.json()["allocations"][0]["holder"].is_null()).then_some(())).await;
    let text = std::fs::read_to_string(node.file()).unwrap();
    let new = node.dir.path().join("new.toml");
    let other =
        "replicas = 2\nmemory = \"4Gi\"\n[compute]\nquantum = \"8ms\"\n[log]\nformat = \"json\"";
    std::fs::write(&new, text.replace("replicas = 4\nmemory = \"2Gi\"", other)).unwrap();
    let new = new.display().to_string();

    let asked = node.run(&["config", "plan", &new, "-o", "json"]);
    assert_eq!(asked.status.code(), Some(0), "{}", stderr(&asked));
    let planned: Value = serde_json::from_slice(&asked.stdout).unwrap();
    let keys: Vec<&str> =
        planned["changes"].as_array().unwrap().iter().map(|c| c["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["share.replicas", "share.memory", "compute.quantum", "log.format"]);
    let share = &planned["shares"][0];
    assert_eq!((&share["retire"], &share["before"]["replicas"]), (&2.into(), &4.into()), "{share}");
    let effects = planned["allocations"][0]["effects"].to_string();
    for part in ["keeps 2 GiB, 25% burst", "gets 4 GiB, 50% burst", "at once: compute.quantum"] {
        assert!(effects.contains(part), "{part}: {effects}");
    }
    let shown = String::from_utf8(node.run(&["config", "plan", &new]).stdout).unwrap();
    assert!(shown.contains("default/a (main)") && shown.contains("4 → 2"), "{shown}");
    assert_eq!(node.kubelet.allocatable(GPU), 8);

    // A bad one, from standard input.
    let mut command = node.command();
    command.args(["config", "plan", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"[share]\nreplicas = 999\n").unwrap();
    let refused = child.wait_with_output().unwrap();
    assert_eq!(refused.status.code(), Some(64));
    let shown = String::from_utf8_lossy(&refused.stdout).into_owned();
    assert!(shown.contains("(standard input):2: share.replicas: must be from 1"), "{shown}");

    node.terminate().await;
    let away = node.run(&["config", "plan", &new]);
    assert_eq!(away.status.code(), Some(69), "{}", stderr(&away));
}

#[tokio::test]
async fn a_part_of_a_file_is_planned_with_what_it_says_and_the_rest_by_name() {
    let node = Simulated::serving().await;
    let plan = |output: &str| {
        let mut command = node.command();
        command
            .args(["config", "plan", "-", "-o", output])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"[share]\nreplicas = 2\n").unwrap();
        String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
    };
    let text = plan("text");
    let said = text.split("NOT IN THE FILE").next().unwrap();
    assert!(said.contains("share.replicas") && !said.contains("paths."), "{text}");
    let rest = text.split("NOT IN THE FILE, SO BACK TO THE DEFAULT\n").nth(1).unwrap();
    let rest: Vec<&str> = rest.lines().take_while(|line| !line.is_empty()).collect();
    assert!(rest.join(" ").contains("after a restart: cdi.directory, paths."), "{text}");
    assert!(rest.len() < 9, "names, and no line for each: {text}");
    // Its values are in the JSON.
    let json: Value = serde_json::from_str(&plan("json")).unwrap();
    let change = |key: &str| {
        json["changes"]
            .as_array()
            .unwrap()
            .iter()
            .find(|change| change["key"] == key)
            .unwrap()
            .clone()
    };
    assert_eq!(change("share.replicas")["absent"], false);
    assert_eq!(change("paths.admin")["absent"], true);
    assert!(change("paths.admin")["before"].is_string());
}

#[test]
fn completions_and_the_reference_are_printed_whatever_the_configuration() {
    let tessera = |args: &[&str]| {
        let mut command = tessera_harness::plugin::tessera();
        let output = command.args(["-c", "/nonexistent.toml"]).args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    // What the shells call, by which this program answers with names (`names`).
    for (shell, part) in [
        ("bash", "_clap_complete_tessera()"),
        ("zsh", "#compdef tessera"),
        ("fish", "--command tessera"),
    ] {
        assert!(tessera(&["completions", shell]).contains(part), "{shell}");
    }
    assert!(tessera(&["config", "reference"]).contains("| `share.replicas` |"));
}
