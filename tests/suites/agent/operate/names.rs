//! Names that a shell completes: asked of the plugin, and silent without one.

use std::process::Output;

use tessera_harness::plugin::{GPU, Simulated, bounded, pod, stderr};

/// What bash gets for the last of these words.
fn completed(node: &Simulated, words: &[&str]) -> (Vec<String>, Output) {
    let config = node.dir.path().join("config.toml");
    let mut command = node.on_machine(std::process::Command::new(&node.program));
    command.env("TESSERA_COMPLETE", "bash").env("_CLAP_IFS", "\n");
    command.env("_CLAP_COMPLETE_INDEX", (words.len() + 2).to_string());
    command.args(["--", "tessera", "-c"]).arg(&config).args(words);
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    (text.lines().map(str::to_owned).collect(), output)
}

#[tokio::test]
async fn pods_allocations_and_gpus_are_completed_from_the_plugin_and_nothing_without_one() {
    let mut node = Simulated::new("replicas = 4").await;
    node.serve().await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    node.kubelet.run(&pod("llm", 1)).await.unwrap();
    let status = bounded(async {
        loop {
            let status = node.json();
            if status["allocations"][0]["holder"]["pod"] == "llm" {
                return status;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    })
    .await;
    let id = status["allocations"][0]["id"].as_str().unwrap();
    let uuid = status["gpus"][1]["uuid"].as_str().unwrap();
    for (words, wanted) in [
        (&["explain", "def"][..], "default/llm"),
        (&["explain", &id[..4]], id),
        (&["explain", &uuid[..5]], uuid),
        (&["quota", "show", "default/"], "default/llm"),
        (&["quota", "set", "default/llm", "--container", "m"], "main"),
        (&["cordon", "1"], "1"),
        (&["uncordon", &uuid[..5]], uuid),
    ] {
        let (names, output) = completed(&node, words);
        assert!(
            names.iter().any(|name| name == wanted),
            "{words:?}: {names:?}, {}",
            stderr(&output)
        );
    }
    let (names, _) = completed(&node, &["cordon", "def"]);
    assert!(!names.iter().any(|name| name.contains("llm")), "a pod is no GPU: {names:?}");

    node.terminate().await;
    let (names, output) = completed(&node, &["explain", "def"]);
    assert!(output.status.success());
    assert_eq!((names, stderr(&output)), (Vec::new(), String::new()));
}
