//! Plugins that are killed, and plugins that take over; odd clients; and what a claim's containers start with, damaged in every
//! way while nobody asks: it is whole again, and said.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use Damage::{Closed, Directory, Overwritten, Removed, Replaced, Truncated, WithDirectory};
use serde_json::Value;
use tessera_fake_kubelet::dra::DraError;
use tessera_harness::http2::{Answer, Client};
use tessera_harness::metrics::get;
use tessera_harness::plugin::{bounded, until};
use tessera_harness::{GIB, MIB, PATIENCE, Rng};
use tessera_kubelet_api::dra::v1::NodePrepareResourcesResponse;
use tessera_kubelet_api::pluginregistration::InfoRequest;

use super::node::{CONTEXT, Claim, Node, one};

/// Claims that come and go while the plugin is killed.
const CLAIMS: usize = 6;
const KILLS: usize = 8;

/// Prepares until a plugin is there that does it.
async fn prepared(node: &Node, claim: &Claim) -> super::node::Container {
    loop {
        match node.prepare(claim).await {
            Ok(container) => return container,
            Err(DraError::Claim { error, .. }) => panic!("{error}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plugin_killed_at_any_moment_loses_no_claim_and_oversells_none() {
    let Some(mut node) = Node::with_containers().await else { return };
    let stays = one("stays", &node.device(0), "2Gi", "20");
    let stays_in = node.prepare(&stays).await.unwrap();
    let mut tenant = node.tenant(&stays_in);
    tenant.must("retain 0");
    let held = tenant.must(&format!("alloc {GIB}"));
    let mut random = Rng::with_seed(7);
    for round in 0..KILLS {
        let claims: Vec<Claim> = (0..CLAIMS)
            .map(|n| one(&format!("c{round}-{n}"), &node.device(1), "1Gi", "10"))
            .collect();
        for claim in &claims {
            node.api.with(|store| store.put_claim(claim.object(&claim.name().name)));
        }
        let names: Vec<_> = claims.iter().map(Claim::name).collect();
        // Killed while it prepares them; kubelet's call fails, or has been answered.
        let calling = node.dra.clone();
        let batch = names.clone();
        let call = tokio::spawn(async move { calling.prepare("pod", &batch).await });
        tokio::time::sleep(Duration::from_micros(random.u64(..8000))).await;
        node.kill();
        let _ = bounded(call).await.unwrap();
        node.serve().await;
        let all = bounded(node.dra.prepare("pod", &names)).await.unwrap();
        assert_eq!(all.len(), CLAIMS);
        assert_eq!(node.delivered(), [CLAIMS + 1, CLAIMS + 1], "round {round}");
        let status = node.status();
        assert_eq!(status["gpus"][1]["memory_limits_bytes"], CLAIMS as u64 * GIB);
        // The share that was there is the same, and its tenant has not noticed.
        assert_eq!(tenant.ask("info").values, [GIB - CONTEXT, 2 * GIB]);
        let more = format!("alloc {GIB}");
        assert_ne!(tenant.ask(&more).result, 0, "beyond the quota after a restart");
        // Killed while it unprepares them.
        let calling = node.dra.clone();
        let call = tokio::spawn(async move { calling.unprepare("pod").await });
        tokio::time::sleep(Duration::from_micros(random.u64(..8000))).await;
        node.kill();
        let _ = bounded(call).await.unwrap();
        node.serve().await;
        bounded(node.dra.unprepare("pod")).await.unwrap();
        // Pages whose record went just before the kill are taken for an allocation of unknown origin, and released
        // after `ledger.release_after`.
        until(|| (node.delivered() == [1, 1]).then_some(())).await;
        assert_eq!(node.status()["gpus"][1]["memory_limits_bytes"], 0);
    }
    tenant.must(&format!("free {held}"));
    let again = node.prepare(&stays).await.unwrap();
    assert_eq!(again.shares, stays_in.shares);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_plugin_waits_ready_and_takes_over_with_all_claims() {
    let Some(mut node) = Node::with_containers().await else { return };
    let chat = one("chat", &node.device(0), "2Gi", "30");
    let container = node.prepare(&chat).await.unwrap();
    let mut tenant = node.tenant(&container);
    tenant.must("retain 0");
    tenant.must(&format!("alloc {GIB}"));

    let mut second = node.launch();
    let address = until(|| second.address()).await;
    assert_eq!(get(address, "/readyz").await.status, 200);
    assert_eq!(get(address, "/healthz").await.status, 200);
    assert_eq!(node.dra.plugins().len(), 1);
    // The first goes on meanwhile.
    let other = one("other", &node.device(0), "1Gi", "10");
    let other_in = node.prepare(&other).await.unwrap();
    assert!(second.ended().is_none(), "{}", second.log());

    let mut first = node.plugin.take().unwrap();
    let begun = Instant::now();
    let registrations = node.dra.registrations();
    first.terminate();
    bounded(node.dra.wait_until(|kubelet| kubelet.registrations() > registrations)).await;
    let took = begun.elapsed();
    assert!(until(|| first.ended()).await.success(), "{}", first.log());
    eprintln!("taken over after {} ms", took.as_millis());
    // A second, on a machine with nothing else to do.
    assert!(took < Duration::from_secs(20), "{took:?}");
    let ready = async {
        loop {
            if let Some(address) = second.address()
                && get(address, "/readyz").await.status == 200
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    bounded(ready).await;

    // Everything is as it was, and goes on.
    assert_eq!(tenant.ask("info").values, [GIB - CONTEXT, 2 * GIB]);
    assert_eq!(prepared(&node, &chat).await.shares, container.shares);
    assert_eq!(prepared(&node, &other).await.shares, other_in.shares);
    let mut late = node.tenant(&prepared(&node, &one("late", &node.device(1), "1Gi", "10")).await);
    late.must("retain 1");
    late.must(&format!("alloc {}", 512 * MIB));
    assert_eq!(node.devices().len(), 2);
    node.unprepare(&other).await;
    assert_eq!(node.delivered(), [2, 2]);
    drop(second);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Damage {
    Removed,
    Truncated,
    /// Written over in place.
    Overwritten,
    /// Another file has its name.
    Replaced,
    /// As container runtimes leave where a mount's source was missing.
    Directory,
    WithDirectory,
    /// For root alone.
    Closed,
}

const FILES: [Damage; 7] =
    [Removed, Truncated, Overwritten, Replaced, Directory, WithDirectory, Closed];

fn damage(path: &Path, damage: Damage) {
    match damage {
        Removed if path.is_dir() => fs::remove_dir_all(path).unwrap(),
        Removed => fs::remove_file(path).unwrap(),
        Truncated => drop(fs::File::options().write(true).truncate(true).open(path).unwrap()),
        Overwritten => {
            let length = usize::try_from(fs::metadata(path).unwrap().len()).unwrap();
            let file = fs::File::options().write(true).open(path).unwrap();
            file.write_all_at(&vec![b'x'; length], 0).unwrap();
        }
        Replaced => {
            let other = path.with_extension("other");
            fs::write(&other, "something else").unwrap();
            fs::rename(other, path).unwrap();
        }
        Directory => {
            // The plugin may put it back in between.
            while fs::remove_file(path).and_then(|()| fs::create_dir(path)).is_err() {}
        }
        WithDirectory => fs::remove_dir_all(path.parent().unwrap()).unwrap(),
        Closed => {
            let mode = if path.is_dir() { 0o700 } else { 0o600 };
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
    }
}

/// What a container needs of a file or directory: its mode, and its bytes, of pages the first few.
fn look(path: &Path) -> Option<(u32, u64, Vec<u8>)> {
    let meta = path.symlink_metadata().ok()?;
    let is_page = path.ends_with("quota") || path.ends_with("usage");
    let bytes = if meta.is_file() { fs::read(path).ok()? } else { Vec::new() };
    let length = if meta.is_file() { meta.len() } else { 0 };
    let shown = if is_page { bytes[..bytes.len().min(8)].to_vec() } else { bytes };
    Some((meta.permissions().mode(), length, shown))
}

/// What `explain` has of restored things.
fn restored(node: &Node) -> u64 {
    let explained: Value =
        serde_json::from_str(&node.must(&["explain", "team/chat", "-o", "json"])).unwrap();
    fn find(value: &Value) -> u64 {
        match value {
            Value::Object(map)
                if map.get("what").is_some_and(|what| what == "restored")
                    && map.contains_key("first_unix_ms") =>
            {
                map["times"].as_u64().unwrap_or(1)
            }
            Value::Object(map) => map.values().map(find).sum(),
            Value::Array(all) => all.iter().map(find).sum(),
            _ => 0,
        }
    }
    find(&explained)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_running_claim_starts_with_is_whole_again_without_a_call() {
    let mut node = Node::start().await;
    let chat = one("chat", &node.device(0), "2Gi", "30");
    let container = node.prepare(&chat).await.unwrap();
    let pages = &container.shares[0];
    let id = pages.file_name().unwrap().to_str().unwrap();
    let spec = node.cdi().join(format!("tessera.dev-share_{id}.json"));
    let text: Value = serde_json::from_slice(&fs::read(&spec).unwrap()).unwrap();
    let edits = &text["devices"][0]["containerEdits"]["mounts"];
    let source = |end: &str| -> PathBuf {
        let mounts = edits.as_array().unwrap().iter();
        let mut sources = mounts.map(|mount| mount["hostPath"].as_str().unwrap());
        sources.find(|source| source.ends_with(end)).unwrap().into()
    };
    let (shim, preload) = (source("libtessera.so"), source("ld.so.preload"));
    let (quota, usage) = (pages.join("quota"), pages.join("usage"));
    let socket = fs::read_dir(pages)
        .unwrap()
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path != &quota && path != &usage && !path.is_file());
    let mut table: Vec<(PathBuf, Vec<Damage>)> = vec![
        (spec, FILES.to_vec()),
        (shim, FILES.to_vec()),
        (preload, FILES.to_vec()),
        (quota.clone(), vec![Removed, Overwritten, Replaced, Directory, Closed]),
        // Its tenant may write to it.
        (usage, vec![Removed, Replaced, Directory]),
        (pages.clone(), vec![Removed, Closed]),
    ];
    table.extend(socket.map(|socket| (socket, vec![Removed, Replaced])));
    for (path, damages) in table {
        let whole = look(&path).unwrap();
        for how in damages {
            // A look that is under way may have seen it whole.
            let before = restored(&node);
            damage(&path, how);
            let what = format!("{}: {how:?}", path.display());
            let is_whole = || (look(&path).as_ref() == Some(&whole)).then_some(());
            let waited = tokio::time::timeout(PATIENCE, until(is_whole)).await;
            assert!(
                waited.is_ok(),
                "{what} stays: {:?}",
                look(&path).map(|(mode, length, _)| (mode, length))
            );
            let said = || (restored(&node) > before).then_some(());
            let waited = tokio::time::timeout(PATIENCE, until(said)).await;
            assert!(
                waited.is_ok(),
                "{what}: nothing is said in {}",
                node.must(&["explain", "team/chat"])
            );
        }
    }
    // The page that plugin and tenants map: a map of what was truncated ends its reader, and the next plugin mends it.
    let whole = look(&quota).unwrap();
    damage(&quota, Truncated);
    node.restart().await;
    until(|| (look(&quota).as_ref() == Some(&whole)).then_some(())).await;
    bounded(node.dra.wait_registered()).await;
    // Whoever starts from it now is held as before.
    let again = node.prepare(&chat).await.unwrap();
    assert_eq!(again.shares, container.shares);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mounted_directory_that_was_removed_on_the_node_is_named_with_what_to_do() {
    let node = Node::start().await;
    let address = until(|| node.plugin.as_ref().unwrap().address()).await;
    let ready = |wanted: u16| async move {
        loop {
            let answer = get(address, "/readyz").await;
            if answer.status == wanted {
                return answer.body;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    ready(200).await;
    // As a pod sees it whose mount holds what was removed.
    fs::create_dir_all(node.cdi()).unwrap();
    let held = fs::File::open(node.cdi()).unwrap();
    fs::remove_dir_all(node.cdi()).unwrap();
    let link =
        format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&held));
    std::os::unix::fs::symlink(link, node.cdi()).unwrap();
    let said = |text: &str| {
        ["cdi.directory", "was removed", "delete the plugin's pod"]
            .iter()
            .all(|part| text.contains(part))
    };
    until(|| said(&node.status()["warnings"].to_string()).then_some(())).await;
    assert!(said(&ready(503).await));
    let chat = one("chat", &node.device(0), "2Gi", "30");
    let error = node.refusal(&chat).await;
    assert!(said(&error), "{error}");
    // The next pod has a directory again.
    fs::remove_file(node.cdi()).unwrap();
    ready(200).await;
    node.prepare(&chat).await.unwrap();
}

// === Connections ===

#[tokio::test]
async fn a_connection_that_asks_nothing_stays_open() {
    // Kubelet connects when it registers the driver, and takes the end for the driver's.
    let node = Node::start().await;
    let dra = node.dra.endpoint().unwrap();
    let mut client = bounded(Client::connect(&dra, b"localhost")).await;
    tokio::time::sleep(Duration::from_secs(11)).await;
    let path = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources";
    let answer: Answer<NodePrepareResourcesResponse> =
        bounded(client.call(path, &InfoRequest {}, 4096)).await;
    assert!(matches!(answer, Answer::Ok(_)), "{answer:?}");
}
