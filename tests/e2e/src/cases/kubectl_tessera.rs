//! `kubectl tessera` with a kubeconfig: an administrator, and readers with rights on one namespace or none.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::deploy::{
    CONTEXT_BYTES, NAMESPACE, PLUGIN_NAMESPACE, REPLICAS, SHARE_BYTES, as_deployed,
};
use crate::kubectl::{Applied, namespace};
use crate::person::{Desk, Person};
use crate::pods::{self, Container, Pod, Restart};
use crate::suite::Suite;
use crate::wait::{self, Look};

/// The readers' namespace.
const TEAM: &str = "tessera-e2e-team";
/// `kubectl tessera` exits so where rights are missing.
const FORBIDDEN: i32 = 77;

/// The text has all of these, wherever its lines are broken.
fn contains(text: &str, parts: &[&str]) -> Result<()> {
    let whole = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in parts {
        let words = part.split_whitespace().collect::<Vec<_>>().join(" ");
        ensure!(whole.contains(&words), "without \"{part}\":\n{text}");
    }
    Ok(())
}

/// The JSON API is served as it was deployed, whatever configuration an earlier case left.
fn served(suite: &Suite<'_>) -> Result<()> {
    match suite.plugin.is_supervised()? {
        true => suite.reconfigure(Some(&as_deployed())),
        false => Ok(()),
    }
}

/// A pod of one share that holds 300 MiB.
fn holder<'a>(suite: &Suite<'a>, name: &str) -> Result<Pod<'a>> {
    let hold = ["tessera-tenant", "hold", "--bytes", "300Mi"];
    let pod = Pod::start(suite.kubectl, name, Container::new("main", 1, &hold))?;
    pod.wait_for_event("main", "ready")?;
    Ok(pod)
}

/// Waits until the plugin knows these pods' names, which kubelet tells it after their start.
fn wait_until_named(suite: &Suite<'_>, pods: &[&str]) -> Result<()> {
    wait::until("kubelet has named the pods", wait::LIMIT, || {
        let known = suite.plugin.status()?["allocations"].to_string();
        let all = pods.iter().all(|pod| known.contains(&format!("\"pod\":\"{pod}\"")));
        Ok(Look::when(all, known))
    })
}

pub fn kubectl_tessera_shows_and_steers_for_an_administrator(suite: &Suite<'_>) -> Result<()> {
    served(suite)?;
    let desk = Desk::new(suite)?;
    let owner = desk.owner(NAMESPACE)?;
    let chat = holder(suite, "chat")?;
    wait_until_named(suite, &["chat"])?;
    kubelet_tells(suite)?;
    sees(suite, &owner)?;
    let wide = [Container::idle("main", REPLICAS)];
    Pod::create(suite.kubectl, "wide", Restart::Always, &[], &wide)?;
    let is_judged = |said: &str| said.contains("nodes are available");
    let why = owner.says_at_last("the scheduler judges", &["why-pending", "wide"], is_judged)?;
    contains(&why, &[&suite.node, "has no room", "largest that fits", "tessera.dev/gpu"])?;
    ensure!(owner.completes(&["explain", "ch"])?.contains(&"chat".to_owned()), "no completion");
    steers(suite, &owner, &chat)
}

/// What only a real kubelet tells: the pod's name, its process on the host, and which replica it preferred.
fn kubelet_tells(suite: &Suite<'_>) -> Result<()> {
    let status = suite.plugin.status()?;
    let mut allocations = status["allocations"].as_array().into_iter().flatten();
    let is_chats = |allocation: &&Value| allocation["holder"]["pod"] == "chat";
    let allocation = allocations.find(is_chats).context("no allocation of chat's")?;
    ensure!(status["plugin"]["registration"] == "live", "{}", status["plugin"]);
    ensure!(status["plugin"]["sees_host_pids"] == true, "{}", status["plugin"]);
    ensure!(allocation["state"] == "started", "{allocation}");
    ensure!(allocation["holder"]["namespace"] == NAMESPACE, "{allocation}");
    ensure!(allocation["holder"]["container"] == "main", "{allocation}");
    ensure!(
        allocation["gpus"][0]["memory_charged_bytes"] == (300 << 20) + CONTEXT_BYTES,
        "{allocation}"
    );
    let processes = allocation["processes"].as_array().context("processes")?;
    ensure!(processes.len() == 1, "{processes:?}");
    let host_pid = &processes[0]["host_pid"];
    let name = suite.plugin.exec(&["cat", &format!("/proc/{host_pid}/comm")])?;
    ensure!(name.trim() == "tessera-tenant", "host pid {host_pid} is {name}");
    let answer = suite.plugin.exec(&["tessera", "explain", "chat", "-o", "json"])?;
    let answer: Value = serde_json::from_str(&answer)?;
    let placement = &answer["allocations"][0]["placement"];
    ensure!(placement["as_preferred"] == true, "{placement}");
    suite.plugin.exec(&["tessera", "status", "--ready"]).map(drop)
}

/// Each view names the pod; that its numbers are the node's own, tests/suites/fleet shows.
fn sees(suite: &Suite<'_>, owner: &Person) -> Result<()> {
    // A pod of the case before may not be released yet.
    let status = owner.says_at_last("nothing is amiss", &["status"], |status| {
        status.contains("1 of 1 nodes answer, 2 GPUs, 1 tenant\n") && !status.contains('!')
    })?;
    contains(&status, &[&suite.node, "healthy"])?;
    let top = owner.says(&["top", "--once"])?;
    let row = top.lines().find(|line| line.contains(&format!("{NAMESPACE}/chat")));
    contains(row.with_context(|| top.clone())?, &["main", "/900M"])?;
    let explained = owner.says(&["explain", "chat"])?;
    contains(&explained, &[&format!("On node {}:", suite.node), "kubelet allocated it"])
}

/// A node's view may be a moment old: one look serves all that ask within it.
fn shows(owner: &Person, words: &[&str]) -> Result<()> {
    let is_there = |status: &str| words.iter().all(|word| status.contains(word));
    owner.says_at_last("status shows it", &["status"], is_there).map(drop)
}

/// `quota` and `cordon` are the plugin's own commands in its pod, and end as these do.
fn steers(suite: &Suite<'_>, owner: &Person, chat: &Pod<'_>) -> Result<()> {
    contains(&owner.says(&["quota", "show", "chat"])?, &["900 MiB"])?;
    owner.says(&["quota", "set", "chat", "--memory", "1800Mi", "--reason", "more for chat"])?;
    ensure!(chat.gpu()?.total == 2 * SHARE_BYTES, "{:?}", chat.gpu()?);
    contains(&owner.says(&["explain", "chat"])?, &["more for chat"])?;
    let beyond = owner.tries(&["quota", "set", "chat", "--memory", "100Gi"])?;
    let by_hand = [&["tessera", "quota", "set"][..], &["tessera-e2e/chat", "--memory", "100Gi"]];
    let by_hand = suite.plugin.try_exec(&by_hand.concat())?;
    ensure!(beyond.code == by_hand.code && beyond.code != Some(0), "{beyond:?} {by_hand:?}");
    contains(&beyond.stderr, &["are possible"])?;
    owner.says(&["quota", "reset", "chat"])?;
    suite.plugin.wait_for_replicas(REPLICAS)?;
    let gpu = format!("{}/1", suite.node);
    owner.says(&["cordon", &gpu, "--reason", "a fan"])?;
    suite.plugin.wait_for_replicas(REPLICAS / 2)?;
    shows(owner, &["GPU 1 is cordoned"])?;
    owner.says(&["uncordon", &gpu])?;
    let nowhere = owner.tries(&["cordon", "nowhere/0"])?;
    ensure!(nowhere.code == Some(1), "{nowhere:?}");
    contains(&nowhere.stderr, &["no plugin is on a node called nowhere", &suite.node])
}

fn object(kind: &str, version: &str, namespace: &str, name: &str) -> Value {
    let metadata = json!({"name": name, "namespace": namespace});
    json!({"apiVersion": version, "kind": kind, "metadata": metadata})
}

/// A role with these rules, and its binding to the reader.
fn granted(namespace: &str, rules: Value) -> [Value; 2] {
    const RBAC: &str = "rbac.authorization.k8s.io/v1";
    let mut role = object("Role", RBAC, namespace, "e2e-reader");
    role["rules"] = rules;
    let mut binding = object("RoleBinding", RBAC, namespace, "e2e-reader");
    binding["roleRef"] =
        json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "e2e-reader"});
    binding["subjects"] = json!([{"kind": "ServiceAccount", "name": "reader", "namespace": TEAM}]);
    [role, binding]
}

pub fn kubectl_tessera_shows_readers_what_is_theirs(suite: &Suite<'_>) -> Result<()> {
    served(suite)?;
    let kubectl = suite.kubectl;
    let _namespace = Applied::new(kubectl, namespace(TEAM))?;
    let mut objects = vec![
        object("ServiceAccount", "v1", TEAM, "reader"),
        object("ServiceAccount", "v1", TEAM, "stranger"),
    ];
    let pods = json!({"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]});
    objects.extend(granted(TEAM, json!([pods])));
    // What the chart's `api.readers` grants.
    let proxy = json!({"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get"]});
    objects.extend(granted(PLUGIN_NAMESPACE, json!([pods, proxy])));
    let _objects = objects
        .into_iter()
        .map(|object| Applied::new(kubectl, object))
        .collect::<Result<Vec<_>>>()?;

    holder(suite, "theirs")?;
    let hold = ["tessera-tenant", "hold", "--bytes", "200Mi"];
    let mut mine =
        pods::manifest("mine", Restart::Always, &[], &[Container::new("main", 1, &hold)]);
    mine["metadata"]["namespace"] = json!(TEAM);
    kubectl.create_pod(&mine)?;
    wait_until_named(suite, &["mine", "theirs"])?;

    let desk = Desk::new(suite)?;
    let outcome = narrowed(suite, &desk.account(suite, TEAM, "reader")?)
        .and_then(|()| refused(&desk.account(suite, TEAM, "stranger")?));
    kubectl.delete_pods(TEAM)?;
    outcome
}

/// A reader sees its own pods, and of others no name.
fn narrowed(suite: &Suite<'_>, reader: &Person) -> Result<()> {
    // A pod of the case before may not be released yet.
    let is_alone = |status: &str| status.contains("1 of 1 nodes answer, 2 GPUs, 2 tenants\n");
    let status = reader.says_at_last("these two pods are alone", &["status"], is_alone)?;
    let json = reader.json(&["status"])?.to_string();
    contains(&json, &["mine", TEAM])?;
    let all = reader.says(&["top", "--once", "-A"])?;
    contains(&all, &["mine", "1 tenant of all namespaces, and 1 that you may not see"])?;
    for text in
        [&status, &json, &all, &reader.says(&["waste", "-A"])?, &reader.says(&["recommend", "-A"])?]
    {
        ensure!(!text.contains("theirs"), "names a pod of others:\n{text}");
    }
    contains(&reader.says(&["explain", "mine"])?, &["kubelet allocated it"])?;
    ensure!(reader.completes(&["explain", "m"])?.contains(&"mine".to_owned()), "no completion");

    let theirs = format!("{NAMESPACE}/theirs");
    for (words, code, says) in [
        // Whether there is such a pod is not said.
        (&["explain", &theirs][..], 1, "nothing of yours is called so"),
        (&["history", &theirs], 1, "nothing of yours is called so"),
        (&["recommend", "-n", NAMESPACE], FORBIDDEN, "may not get pods in tessera-e2e;"),
        (&["waste", "-n", NAMESPACE], FORBIDDEN, "may not get pods in tessera-e2e;"),
        (&["recommend", &theirs], FORBIDDEN, "may not get pods in tessera-e2e;"),
        (&["why-pending", &theirs], FORBIDDEN, "you may not get pods"),
        (&["quota", "show", "mine"], FORBIDDEN, "you may not create pods/exec"),
        (&["quota", "set", &theirs, "--memory", "1Gi"], FORBIDDEN, "you may not get pods"),
        (&["cordon", &suite.node], FORBIDDEN, "you may not create pods/exec"),
    ] {
        let said = reader.tries(words)?;
        ensure!(said.code == Some(code), "{words:?}: {said:?}");
        contains(&said.stderr, &[says]).with_context(|| format!("{words:?}"))?;
        ensure!(said.stderr.lines().count() == 1, "{words:?}: {said:?}");
    }
    Ok(())
}

/// Without any right, each command is one sentence that says what to ask for.
fn refused(stranger: &Person) -> Result<()> {
    for words in [&["status"][..], &["top", "--once"], &["explain", "mine"], &["waste"]] {
        let said = stranger.tries(words)?;
        ensure!(said.code == Some(FORBIDDEN) && said.stdout.is_empty(), "{words:?}: {said:?}");
        contains(&said.stderr, &["you may not see the plugin's pods", "pods/proxy", "Readers"])?;
        ensure!(said.stderr.lines().count() == 1, "{words:?}: {said:?}");
    }
    let why = stranger.tries(&["why-pending", "mine"])?;
    ensure!(why.code == Some(FORBIDDEN) && why.stderr.lines().count() == 1, "{why:?}");
    ensure!(stranger.completes(&["explain", "m"])?.is_empty(), "names without a right");
    Ok(())
}
