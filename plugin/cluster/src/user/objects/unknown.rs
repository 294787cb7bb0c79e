//! Names of fields that this program does not know. A rule of the scheduler may hang on them, and a verdict must not be
//! sure where one is set. Values are not kept, and neither are names of fields that no filter of kube-scheduler reads:
//! a list of all pods stays small.

use std::collections::BTreeSet;
use std::fmt;

use serde::Deserializer;
use serde::de::{IgnoredAny, MapAccess, Visitor};

/// Fields of a pod's specification that no filter reads, as of Kubernetes 1.36.
const SPEC: [&str; 25] = [
    "activeDeadlineSeconds",
    "automountServiceAccountToken",
    "dnsConfig",
    "dnsPolicy",
    "enableServiceLinks",
    "ephemeralContainers",
    "hostAliases",
    "hostIPC",
    "hostPID",
    "hostname",
    "hostnameOverride",
    "imagePullSecrets",
    "os",
    "preemptionPolicy",
    "priorityClassName",
    "readinessGates",
    "restartPolicy",
    "runtimeClassName",
    "securityContext",
    "serviceAccount",
    "serviceAccountName",
    "setHostnameAsFQDN",
    "shareProcessNamespace",
    "subdomain",
    "terminationGracePeriodSeconds",
];

/// Fields of a container that no filter reads.
const CONTAINER: [&str; 20] = [
    "args",
    "command",
    "env",
    "envFrom",
    "image",
    "imagePullPolicy",
    "lifecycle",
    "livenessProbe",
    "readinessProbe",
    "resizePolicy",
    "securityContext",
    "startupProbe",
    "stdin",
    "stdinOnce",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "tty",
    "volumeDevices",
    "volumeMounts",
    "workingDir",
];

/// Kinds of volumes that no filter reads: they are made on the node, or are reached from every node, and count towards
/// no limit on attached volumes.
const VOLUME: [&str; 19] = [
    "cephfs",
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "fc",
    "flexVolume",
    "flocker",
    "gitRepo",
    "glusterfs",
    "hostPath",
    "image",
    "nfs",
    "photonPersistentDisk",
    "projected",
    "quobyte",
    "scaleIO",
    "secret",
    "storageos",
];

/// Rules that only rank nodes.
const PREFERENCES: [&str; 1] = ["preferredDuringSchedulingIgnoredDuringExecution"];

/// The API server merges these into the selector.
const TERM: [&str; 2] = ["matchLabelKeys", "mismatchLabelKeys"];

/// When a tolerated taint evicts a pod.
const TOLERATION: [&str; 1] = ["tolerationSeconds"];

macro_rules! readers {
    ($($name:ident: $known:expr;)*) => {$(
        pub(super) fn $name<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeSet<String>, D::Error> {
            from.deserialize_map(Names { known: &$known })
        }
    )*};
}

readers! {
    of_spec: SPEC;
    of_container: CONTAINER;
    of_volume: VOLUME;
    of_affinity: [];
    of_rules: PREFERENCES;
    of_term: TERM;
    of_toleration: TOLERATION;
}

struct Names {
    known: &'static [&'static str],
}

impl<'de> Visitor<'de> for Names {
    type Value = BTreeSet<String>;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut unknown = BTreeSet::new();
        while let Some((name, IgnoredAny)) = map.next_entry::<String, IgnoredAny>()? {
            if !self.known.contains(&name.as_str()) {
                unknown.insert(name);
            }
        }
        Ok(unknown)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::user::objects::Pod;

    /// A common field that is neither read nor listed would make every verdict on such a pod unsure.
    #[test]
    fn what_pods_commonly_have_is_known() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": { "name": "chat", "uid": "1" },
            "spec": {
                "volumes": [
                    { "name": "a", "emptyDir": {} },
                    { "name": "b", "projected": { "sources": [] } },
                    { "name": "c", "persistentVolumeClaim": { "claimName": "models", "readOnly": true } },
                ],
                "initContainers": [{ "name": "i", "image": "x", "restartPolicy": "Always" }],
                "containers": [{
                    "name": "main", "image": "x", "command": ["a"], "args": ["b"], "env": [], "envFrom": [],
                    "ports": [{ "containerPort": 80, "protocol": "TCP", "hostPort": 80, "hostIP": "10.0.0.1" }],
                    "resources": { "limits": {}, "claims": [{ "name": "gpu" }] },
                    "volumeMounts": [], "imagePullPolicy": "Always", "terminationMessagePath": "/dev/log",
                    "terminationMessagePolicy": "File", "livenessProbe": {}, "securityContext": {},
                }],
                "affinity": { "nodeAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [] } },
                "tolerations": [{ "operator": "Exists", "tolerationSeconds": 300 }],
                "restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "serviceAccountName": "default",
                "serviceAccount": "default", "securityContext": {}, "schedulerName": "default-scheduler",
                "priority": -7, "preemptionPolicy": "Never", "enableServiceLinks": true, "hostUsers": false,
                "terminationGracePeriodSeconds": 30, "runtimeClassName": "nvidia", "hostNetwork": true,
            },
            "status": { "phase": "Pending", "qosClass": "Burstable", "nominatedNodeName": "a" },
        }))
        .unwrap();
        let spec = &pod.spec;
        assert!(spec.unknown.is_empty() && spec.containers[0].unknown.is_empty(), "{pod:#?}");
        assert!(spec.tolerations[0].unknown.is_empty());
        assert!(spec.volumes.iter().all(|volume| volume.kinds.is_empty()), "{:#?}", spec.volumes);
        let claim = spec.volumes[2].persistent_volume_claim.as_ref();
        assert_eq!(claim.unwrap().claim_name, "models");
        let port = &spec.containers[0].ports[0];
        assert_eq!((port.host_port, port.host_ip.as_str(), spec.priority), (80, "10.0.0.1", -7));
        assert_eq!((spec.host_network, spec.host_users), (true, Some(false)));
        assert_eq!(pod.status.nominated_node_name, "a");
    }

    #[test]
    fn the_names_of_other_fields_are_kept() {
        let names =
            |spec: Value| -> Pod { serde_json::from_value(json!({ "spec": spec })).unwrap() };
        let pod = names(json!({
            "schedulingGroup": { "podGroupName": "g" },
            "containers": [{ "name": "main", "gravity": 1 }],
            "volumes": [{ "name": "v", "iscsi": { "iqn": "q" } }],
            "affinity": { "planetAffinity": {}, "podAntiAffinity": {
                "requiredDuringSchedulingRequiredDuringExecution": [],
                "requiredDuringSchedulingIgnoredDuringExecution": [{ "topologyKey": "k", "matchLabelKeys": [], "x": 1 }],
            }},
        }));
        let only =
            |set: &std::collections::BTreeSet<String>| set.iter().cloned().collect::<String>();
        assert_eq!(only(&pod.spec.unknown), "schedulingGroup");
        assert_eq!(only(&pod.spec.containers[0].unknown), "gravity");
        assert_eq!(only(&pod.spec.volumes[0].kinds), "iscsi");
        let affinity = pod.spec.affinity.unwrap();
        assert_eq!(only(&affinity.unknown), "planetAffinity");
        let rules = affinity.pod_anti_affinity.unwrap();
        assert_eq!(only(&rules.unknown), "requiredDuringSchedulingRequiredDuringExecution");
        let term = &rules.required_during_scheduling_ignored_during_execution[0];
        assert_eq!((only(&term.unknown).as_str(), term.topology_key.as_str()), ("x", "k"));
    }
}
