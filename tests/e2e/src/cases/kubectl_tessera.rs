//! `kubectl tessera` with a kubeconfig: an administrator, readers with rights on one namespace or none, and users with
//! a client certificate.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::deploy::{
    CONTEXT_BYTES, NAMESPACE, PLUGIN_NAMESPACE, REPLICAS, SHARE_BYTES, as_deployed,
};
use crate::kubectl::{Applied, namespace};
use crate::person::{Desk, Person};
use crate::pods::{self, Container, Pod, Restart};
use crate::process;
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
    // Kubelet names the holder only after the container has started.
    let (status, allocation) = wait::until("status names the pod", wait::LIMIT, || {
        let status = suite.plugin.status()?;
        let mut all = status["allocations"].as_array().into_iter().flatten();
        let found = all.find(|allocation| allocation["holder"]["pod"] == "chat").cloned();
        let seen = status["allocations"].to_string();
        Ok(Look::found(found.map(|allocation| (status, allocation)), seen))
    })?;
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

/// Each view names the pod, in numbers that are the plugin's own.
fn sees(suite: &Suite<'_>, owner: &Person) -> Result<()> {
    // Kubelets of old say what other plugins sell only once a pod holds something; and a pod of the case before may
    // not be released yet.
    let status = owner.says_at_last("nothing is amiss", &["status"], |status| {
        status.contains("1 of 1 nodes answer, 2 GPUs, 1 tenant\n") && !status.contains('!')
    })?;
    contains(&status, &[&suite.node, "healthy"])?;
    let fleet = owner.json(&["status"])?;
    let view = &fleet["nodes"][0]["view"];
    let own = suite.plugin.status()?;
    for (theirs, ours) in [
        (&view["tenants"][0]["gpus"][0]["memory_limit_bytes"], json!(SHARE_BYTES)),
        (
            &view["tenants"][0]["gpus"][0]["memory_charged_bytes"],
            own["allocations"][0]["gpus"][0]["memory_charged_bytes"].clone(),
        ),
    ] {
        ensure!(*theirs == ours, "{theirs} is {ours} by the plugin");
    }
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

fn object(kind: &str, version: &str, namespace: &str, name: &str, more: Value) -> Value {
    let mut object = json!({
        "apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": namespace},
    });
    if let (Some(object), Value::Object(more)) = (object.as_object_mut(), more) {
        object.extend(more);
    }
    object
}

/// A role, and its binding to one subject.
fn granted(namespace: &str, name: &str, rules: Value, subject: Value) -> [Value; 2] {
    const RBAC: &str = "rbac.authorization.k8s.io/v1";
    let role = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name});
    [
        object("Role", RBAC, namespace, name, json!({"rules": rules})),
        object(
            "RoleBinding",
            RBAC,
            namespace,
            name,
            json!({"roleRef": role, "subjects": [subject]}),
        ),
    ]
}

/// What the chart's `api.readers` grants.
fn reading() -> Value {
    json!([
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
        {"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get"]},
    ])
}

pub fn kubectl_tessera_shows_readers_what_is_theirs(suite: &Suite<'_>) -> Result<()> {
    served(suite)?;
    let kubectl = suite.kubectl;
    let _namespace = Applied::new(kubectl, namespace(TEAM))?;
    let account = |name: &str| object("ServiceAccount", "v1", TEAM, name, json!({}));
    let subject = json!({"kind": "ServiceAccount", "name": "reader", "namespace": TEAM});
    let mut objects = vec![account("reader"), account("stranger")];
    objects.extend(granted(
        TEAM,
        "e2e-reader",
        json!([
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
        ]),
        subject.clone(),
    ));
    objects.extend(granted(PLUGIN_NAMESPACE, "e2e-reader", reading(), subject));
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

/// A user whose certificate the cluster's own signer made; `None` where the API server knows no certificates.
fn certified(suite: &Suite<'_>, desk: &Desk, name: &str) -> Result<Option<Person>> {
    let known = ["configmap", "extension-apiserver-authentication", "-n", "kube-system"];
    let known = suite.kubectl.find(&known)?.unwrap_or_default();
    if !known["data"]["client-ca-file"].is_string() {
        return Ok(None);
    }
    let key = desk.dir().join(format!("{name}.key"));
    let csr = desk.dir().join(format!("{name}.csr"));
    let mut make = Command::new("openssl");
    make.args(["req", "-newkey", "rsa:2048", "-nodes", "-subj", &format!("/CN={name}")]);
    openssl(make.arg("-keyout").arg(&key).arg("-out").arg(&csr))?;
    let request = json!({
        "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
        "metadata": {"name": name},
        "spec": {
            "request": base64(&csr)?,
            "signerName": "kubernetes.io/kube-apiserver-client",
            "usages": ["client auth"],
        },
    });
    let _request = Applied::new(suite.kubectl, request)?;
    suite.kubectl.run(&["certificate", "approve", name])?;
    let certificate = wait::until("the certificate is made", wait::LIMIT, || {
        let now = suite.kubectl.get(&["certificatesigningrequest", name])?;
        let status = &now["status"];
        if status["conditions"].to_string().contains("\"Failed\"") {
            bail!("{status}");
        }
        let made = status["certificate"].as_str().map(str::to_owned);
        Ok(Look::found(made, status.to_string()))
    })?;
    let credentials = json!({
        "client-certificate-data": certificate,
        "client-key-data": base64(&key)?,
    });
    desk.person(name, NAMESPACE, credentials).map(Some)
}

/// A file's content in base64.
fn base64(file: &Path) -> Result<String> {
    let text = openssl(Command::new("openssl").args(["base64", "-A", "-in"]).arg(file))?;
    Ok(text.trim().to_owned())
}

fn openssl(command: &mut Command) -> Result<String> {
    process::run(command, None, Duration::from_secs(60))?.success("openssl")
}

pub fn kubectl_tessera_serves_client_certificates(suite: &Suite<'_>) -> Result<()> {
    served(suite)?;
    let desk = Desk::new(suite)?;
    let Some(user) = certified(suite, &desk, "tessera-e2e-certified")? else {
        println!("     not run: the API server knows no client certificates (--client-ca-file)");
        return Ok(());
    };
    holder(suite, "chat")?;
    wait_until_named(suite, &["chat"])?;
    let said = user.tries(&["status"])?;
    ensure!(said.code == Some(FORBIDDEN), "{said:?}");
    contains(&said.stderr, &["you may not see the plugin's pods"])?;

    let subject = json!({"kind": "User", "name": "tessera-e2e-certified"});
    let apply = |name: &str, rules: Value| -> Result<Vec<Applied<'_>>> {
        let objects = granted(PLUGIN_NAMESPACE, name, rules, subject.clone());
        objects.into_iter().map(|object| Applied::new(suite.kubectl, object)).collect()
    };
    let _reading = apply("e2e-certified", reading())?;
    wait::until("what the rights still lack is said", wait::LIMIT, || {
        let said = user.tries(&["status"])?;
        // Sentences are wrapped.
        let words = said.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        let all = ["client certificate", "tessera/tessera-viewer", "serviceaccounts/token"];
        let is_said = said.code == Some(FORBIDDEN) && all.iter().all(|word| words.contains(word));
        Ok(Look::when(is_said, format!("{said:?}")))
    })?;

    let token = json!([{
        "apiGroups": [""], "resources": ["serviceaccounts/token"],
        "resourceNames": ["tessera-viewer"], "verbs": ["create"],
    }]);
    let _token = apply("e2e-certified-token", token)?;
    shows(&user, &["1 of 1 nodes answer"])?;
    contains(&user.says(&["top", "--once", "-A"])?, &["chat"])?;
    contains(&user.says(&["explain", "chat"])?, &["kubelet allocated it"])
}
