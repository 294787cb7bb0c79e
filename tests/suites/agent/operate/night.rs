//! What an operator types at night: a status that fits a screen, JSON with a version, cordons with their makers,
//! and plans of a part of a file.

use std::io::Write;
use std::process::Stdio;

use serde_json::Value;
use tessera_harness::plugin::{Simulated, stderr};

const VERSION: &str = "tessera.dev/v1";

fn stdout(node: &Simulated, args: &[&str]) -> String {
    let output = node.run(args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

async fn with_pod(name: &str) -> Simulated {
    let node = Simulated::serving().await;
    node.start_pod(name, 1).await;
    node.named(name).await;
    node
}

#[tokio::test]
async fn status_fits_120_columns_with_the_longest_name_and_its_short_id_is_enough() {
    let name = format!("{}-x2x8p", "a".repeat(247));
    let node = with_pod(&name).await;
    let text = stdout(&node, &["status"]);
    assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    assert!(text.contains("x2x8p/main") && !text.contains('\x1b'), "{text}");
    let wide = stdout(&node, &["status", "-o", "wide"]);
    assert!(wide.contains(&format!("default/{name}/main")), "{wide}");
    let row = text.lines().find(|line| line.contains("x2x8p/main")).unwrap();
    let id = row.split_whitespace().last().unwrap();
    for args in
        [&["explain", id][..], &["quota", "show", id], &["quota", "set", id, "--cores", "30"]]
    {
        stdout(&node, args);
    }
}

#[tokio::test]
async fn json_of_every_command_has_the_version() {
    let node = with_pod("a").await;
    let plan = node.file().display().to_string();
    for args in [
        &["status", "-o", "json"][..],
        &["top", "--once", "--interval", "100ms", "-o", "json"],
        &["explain", "a", "-o", "json"],
        &["quota", "show", "-o", "json"],
        &["quota", "show", "a", "-o", "json"],
        &["quota", "set", "a", "--cores", "20", "-o", "json"],
        &["quota", "reset", "a", "-o", "json"],
        &["cordon", "0", "-o", "json"],
        &["uncordon", "0", "-o", "json"],
        &["config", "plan", &plan, "-o", "json"],
        &["config", "reload", "-o", "json"],
    ] {
        let json: Value = serde_json::from_str(&stdout(&node, args)).unwrap();
        assert_eq!(json["api_version"], VERSION, "{args:?}: {json}");
    }
    let unknown = node.run(&["quota", "show", "nobody"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(stderr(&unknown).contains("there is default/a"), "{}", stderr(&unknown));
}

#[tokio::test]
async fn a_cordon_names_its_maker_and_lifting_the_nodes_leaves_that_of_a_gpu() {
    let node = with_pod("a").await;
    stdout(&node, &["cordon", "1", "--reason", "fans"]);
    stdout(&node, &["cordon", "--all"]);
    let left = stdout(&node, &["uncordon", "--all"]);
    for part in
        ["the node: no longer cordoned", "still cordoned:", "GPU 1 (", ": fans; `tessera uncordon"]
    {
        assert!(left.contains(part), "{part}: {left}");
    }
    if nix::unistd::geteuid().is_root() {
        assert!(left.contains("by root"), "{left}");
    }
    let text = stdout(&node, &["status"]);
    assert!(
        text.contains("GPU 1 is cordoned by") && text.contains("`tessera uncordon 1`"),
        "{text}"
    );
    assert!(!text.contains("unhealthy"), "{text}");
    assert_eq!(
        stdout(&node, &["uncordon", "--all", "--each"]).lines().last(),
        Some("nothing is cordoned")
    );
}

#[tokio::test]
async fn a_part_of_a_file_is_planned_with_what_it_says_and_the_rest_by_name() {
    let node = with_pod("a").await;
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
