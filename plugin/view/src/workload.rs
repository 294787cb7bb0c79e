//! Which workload a pod is one of, by its name: controllers name pods by rule, and the node's plugin knows no owners.

/// Letters that Kubernetes' name generator uses (`apimachinery/pkg/util/rand`): no vowels, no 0, 1, 3.
const GENERATED: &str = "bcdfghjklmnpqrstvwxz2456789";

/// The workload of a pod: `web` of `web-7c9d8f6b5-x2v4q` (Deployment), of `web-29412345-x2v4q` (CronJob: the minute that
/// it was planned for, since 1970), of `web-0` (StatefulSet) and of `web-x2v4q` (DaemonSet, Job); else the pod's own
/// name.
pub fn of(pod: &str) -> &str {
    let generated = |text: &str| !text.is_empty() && text.chars().all(|c| GENERATED.contains(c));
    let hash = |text: &str| (6..=10).contains(&text.len()) && generated(text);
    let minute = |text: &str| text.len() == 8 && text.bytes().all(|byte| byte.is_ascii_digit());
    let Some((front, last)) = pod.rsplit_once('-') else { return pod };
    if front.is_empty() {
        return pod;
    }
    if last.len() == 5 && generated(last) {
        return match front.rsplit_once('-') {
            Some((name, part)) if !name.is_empty() && (hash(part) || minute(part)) => name,
            _ => front,
        };
    }
    let ordinal = !last.is_empty() && last.len() <= 5 && last.bytes().all(|b| b.is_ascii_digit());
    if ordinal { front } else { pod }
}

#[cfg(test)]
mod tests {
    use super::of;

    #[test]
    fn pods_of_controllers_are_their_workloads() {
        for (pod, workload) in [
            ("chat-7c9d8f6b5-x2v4q", "chat"),
            ("chat-gpu-7c9d8f6b5-x2v4q", "chat-gpu"),
            ("chat-0", "chat"),
            ("chat-12", "chat"),
            ("train-29412345-x2v4q", "train"),
            ("train-29456789-x2v4q", "train"),
            ("train-2941234-x2v4q", "train-2941234"),
            ("chat-x2v4q", "chat"),
            ("chat", "chat"),
            ("chat-large", "chat-large"),
            ("-0", "-0"),
            ("", ""),
        ] {
            assert_eq!(of(pod), workload, "{pod}");
        }
    }
}
