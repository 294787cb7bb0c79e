use proptest::prelude::*;

use super::*;

const ID: &str = "0123456789abcdef0123456789abcdef";
const OTHER: &str = "fedcba9876543210fedcba9876543210";
const UID: &str = "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff";

/// The plugin's own mounts, as deploy/tessera.yaml makes them.
const OWN: &str = "\
1 0 0:20 / / ro - overlay overlay ro
2 1 253:1 /var/lib/kubelet/plugins/tessera.dev /var/lib/kubelet/plugins/tessera.dev rw - ext4 /dev/vda1 rw
3 2 0:99 / /var/lib/kubelet/plugins/tessera.dev/pages rw - tmpfs tessera rw
4 1 253:1 /var/lib/tessera /var/lib/tessera rw - ext4 /dev/vda1 rw
";

fn sources() -> Sources {
    let own = Mounts::parse(OWN);
    let at = |directory| Source::of(&own, directory).unwrap();
    let sources = Sources {
        pages: at("/var/lib/kubelet/plugins/tessera.dev/pages"),
        shim: at("/var/lib/tessera/shim"),
    };
    assert_eq!(sources.pages, Source { device: "0:99".into(), root: String::new() });
    assert_eq!(
        sources.shim,
        Source { device: "253:1".into(), root: "/var/lib/tessera/shim".into() }
    );
    sources
}

/// A container's mounts, as kubelet and runc make them, and more.
fn container(more: &[&str]) -> String {
    let mut text = format!(
        "100 50 0:70 / / rw - overlay overlay rw
101 100 0:71 / /proc rw - proc proc rw
102 100 0:99 /{ID} /usr/local/tessera/pages/{ID} ro,nosuid - tmpfs tessera rw
103 102 0:99 /{ID}/usage /usr/local/tessera/pages/{ID}/usage rw,nosuid - tmpfs tessera rw
104 100 253:1 /var/lib/tessera/shim/00112233445566aa/libtessera.so /usr/local/tessera/libtessera.so ro - ext4 /dev/vda1 rw
105 100 253:1 /var/lib/tessera/shim/00112233445566aa/ld.so.preload /etc/ld.so.preload ro - ext4 /dev/vda1 rw
106 100 253:1 /var/lib/kubelet/pods/{UID}/etc-hosts /etc/hosts rw - ext4 /dev/vda1 rw
107 100 253:1 /var/lib/kubelet/pods/{UID}/containers/main/0a1b2c3d /dev/termination-log rw - ext4 /dev/vda1 rw
"
    );
    for line in more {
        text += line;
        text.push('\n');
    }
    text
}

/// The same as a plugin made them that knew one share for each container.
fn old(text: &str) -> String {
    text.replace(&format!("pages/{ID}"), "pages")
}

/// Another share of the container, mounted at this name.
fn beside(device: &str, root: &str, name: &str) -> String {
    format!("110 100 {device} {root} /usr/local/tessera/pages/{name} ro - tmpfs tessera rw")
}

#[test]
fn a_container_that_an_older_plugin_set_up_is_known_and_judged_as_ever() {
    let text = old(&container(&[]));
    assert_eq!(damages(&text), [""; 0]);
    assert_eq!(Mounts::parse(&text).allocations(Some(&sources().pages))[0].as_str(), ID);
    assert_eq!(damages(&text.replace("pages ro,nosuid", "pages rw,nosuid")), ["Pages Writable"]);
    let over = "108 102 253:1 /v /usr/local/tessera/pages rw - ext4 /dev/vda1 rw\n";
    assert_eq!(damages(&format!("{text}{over}")), ["Pages Shadowed", "Usage Shadowed"]);
    let quota = "108 102 253:1 /v /usr/local/tessera/pages/quota ro - ext4 /dev/vda1 rw\n";
    assert_eq!(damages(&format!("{text}{quota}")), ["Quota Shadowed"]);
}

#[test]
fn a_container_may_have_several_shares() {
    let (pages, other) = (sources().pages, beside("0:99", &format!("/{OTHER}"), OTHER));
    let text = container(&[&other]);
    let found = Mounts::parse(&text).allocations(Some(&pages));
    assert_eq!(found.iter().map(AllocationId::as_str).collect::<Vec<_>>(), [ID, OTHER]);
    assert_eq!(damages(&text), [""; 0]);
    let other = AllocationId::parse(OTHER).unwrap();
    let of_other = Mounts::parse(&text).damages(&other, true, &sources());
    assert_eq!(of_other.len(), 1, "its usage page is not mounted: {of_other:?}");
}

#[test]
fn what_is_mounted_beside_the_shares_and_is_none_is_seen() {
    let volume = format!("/var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~secret/v");
    for (device, root, name) in [
        ("253:1", volume.as_str(), OTHER),
        ("253:1", volume.as_str(), "x"),
        // Ours under another's name, and another's of ours.
        ("0:99", &*format!("/{ID}"), OTHER),
        ("0:98", &*format!("/{OTHER}"), OTHER),
    ] {
        let text = container(&[&beside(device, root, name)]);
        assert_eq!(damages(&text), ["Pages Added"], "{device} {root} {name}");
    }
    let id = AllocationId::parse(ID).unwrap();
    let text = container(&[&beside("253:1", "/v", "x")]);
    let said = Mounts::parse(&text).damages(&id, true, &sources())[0].to_string();
    assert!(said.contains("something else is mounted in /usr/local/tessera/pages"), "{said}");
}

fn damages(text: &str) -> Vec<String> {
    let id = AllocationId::parse(ID).unwrap();
    let found = Mounts::parse(text).damages(&id, true, &sources());
    found.iter().map(|Damage { part, fault }| format!("{part:?} {fault:?}")).collect()
}

#[test]
fn a_container_as_it_was_given_has_nothing_amiss() {
    let text = container(&[]);
    assert_eq!(damages(&text), [""; 0]);
    let mounts = Mounts::parse(&text);
    assert_eq!(mounts.allocations(None)[0].as_str(), ID);
    assert_eq!(mounts.container(), Some((UID, "main")));
    // Volumes elsewhere are the pod's own affair; so is a nested mount below one.
    let volumes = [
        "108 100 253:1 /v /usr/local/lib rw - ext4 /dev/vda1 rw",
        "109 100 0:12 / /usr/local/tesserae rw - tmpfs x rw",
    ];
    assert_eq!(damages(&container(&volumes)), [""; 0]);
}

#[test]
fn a_volume_over_the_pages_is_seen_whatever_it_is_named() {
    let volume = format!("/var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~empty-dir/v");
    for root in [volume.clone(), format!("{volume}/{ID}"), format!("/{OTHER}")] {
        let line = format!("108 100 253:1 {root} /usr/local/tessera/pages rw - ext4 /dev/vda1 rw");
        // The usage page that was mounted before is under it as well.
        assert_eq!(damages(&container(&[&line])), ["Pages Shadowed", "Usage Shadowed"], "{root}");
        let other = line.replace("253:1", "0:99").replace(&root, &format!("/{OTHER}"));
        assert_eq!(damages(&container(&[&other])), ["Pages Shadowed", "Usage Shadowed"]);
    }
}

#[test]
fn a_volume_over_a_directory_above_is_seen() {
    let line = "108 100 253:1 /v /usr/local rw - ext4 /dev/vda1 rw";
    let text = container(&[line]);
    assert_eq!(damages(&text), ["Pages Shadowed", "Usage Shadowed", "Shim Shadowed"]);
    // Mounted before ours, as a runtime does that sorts by depth, it is not over anything.
    let sorted = text.replace("108 100", "99 100").replace("\n102 100", "\n102 99");
    let sorted = sorted.replace("\n104 100", "\n104 99");
    assert_eq!(damages(&sorted), [""; 0]);
}

#[test]
fn an_emptied_or_replaced_preload_file_is_seen() {
    let over = |root: &str, device: &str| {
        let line = format!("108 105 {device} {root} /etc/ld.so.preload rw - x x rw");
        damages(&container(&[&line]))
    };
    assert_eq!(over("/null", "0:5"), ["Preload Shadowed"]);
    assert_eq!(over("/x/ld.so.preload", "0:6"), ["Preload Shadowed"]);
    assert_eq!(over("/var/lib/tessera/shim/../ld.so.preload", "253:2"), ["Preload Shadowed"]);
    // A runtime that lets the pod's own mount take the place of ours.
    let text = container(&[]);
    let replaced = text.replace("shim/00112233445566aa/ld.so.preload", "volume/empty");
    assert_eq!(damages(&replaced), ["Preload Shadowed"]);
    let without: String =
        text.lines().filter(|l| !l.contains("preload")).map(|l| format!("{l}\n")).collect();
    assert_eq!(damages(&without), ["Preload Missing"]);
    let id = AllocationId::parse(ID).unwrap();
    let mounts = Mounts::parse(&without);
    assert_eq!(mounts.damages(&id, false, &sources()), [], "injected by LD_PRELOAD");
    assert!(mounts.damages(&id, true, &sources())[0].may_be_innocent());
}

#[test]
fn what_became_writable_or_went_is_seen() {
    let text = container(&[]);
    assert_eq!(
        damages(&text.replace(&format!("pages/{ID} ro,nosuid"), &format!("pages/{ID} rw,nosuid"))),
        ["Pages Writable"]
    );
    assert_eq!(damages(&text.replace("preload ro", "preload rw")), ["Preload Writable"]);
    let without = |id: &str| -> String {
        text.lines().filter(|l| !l.starts_with(id)).map(|l| format!("{l}\n")).collect()
    };
    assert_eq!(damages(&without("103 ")), ["Usage Missing"]);
    assert_eq!(damages(&without("104 ")), ["Shim Missing"]);
    assert_eq!(damages("").len(), 4);
}

#[test]
fn pages_of_a_file_system_that_was_replaced_are_distinguished() {
    let text = container(&[]).replace("0:99", "0:98");
    assert_eq!(damages(&text), ["Pages Foreign", "Usage Foreign"]);
    // Removed on the host, they are still ours.
    let removed = container(&[]).replace(&format!("0:99 /{ID} "), &format!("0:99 /{ID}//deleted "));
    assert_eq!(damages(&removed), [""; 0]);
}

#[test]
fn a_copy_of_the_namespace_in_another_order_is_read_the_same() {
    let text = container(&["108 100 0:5 /null /usr/local/tessera/pages rw - x x rw"]);
    let mut lines: Vec<&str> = text.lines().collect();
    lines.reverse();
    let damaged = damages(&lines.join("\n"));
    assert_eq!(damaged, ["Pages Shadowed", "Usage Shadowed"]);
}

#[test]
fn a_container_without_our_mounts_names_no_allocation() {
    assert_eq!(Mounts::parse("100 50 0:70 / / rw - overlay overlay rw").allocations(None), []);
    assert_eq!(Mounts::parse("garbage\n1 2 3\n").container(), None);
    // A volume's own directories say nothing.
    let line = "9 1 8:1 /var/lib/kubelet/pods/x/containers/y /v rw - ext4 d rw";
    assert_eq!(Mounts::parse(line).container(), None);
}

#[test]
fn this_processes_own_mounts_lead_somewhere() {
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let own = Mounts::parse(&text);
    assert!(Source::of(&own, "/").is_some());
    assert!(Source::of(&own, "/proc").is_some());
}

#[test]
fn a_file_over_one_of_the_pages_directory_is_seen() {
    for (file, part) in [("quota", "Quota"), ("session.sock", "Session"), ("gate.sock", "Gate")] {
        let line = format!(
            "108 102 253:1 /v/x /usr/local/tessera/pages/{ID}/{file} ro - ext4 /dev/vda1 rw"
        );
        assert_eq!(damages(&container(&[&line])), [format!("{part} Shadowed")]);
    }
    // A mount beside them is nobody's page.
    let line =
        format!("108 102 253:1 /v/x /usr/local/tessera/pages/{ID}/other ro - ext4 /dev/vda1 rw");
    assert_eq!(damages(&container(&[&line])), [""; 0]);
}

#[test]
fn a_volume_that_is_named_like_an_allocation_makes_no_container_its() {
    let pages = &sources().pages;
    let volume = format!(
        "99 100 253:1 /var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~empty-dir/v/{OTHER} \
         /usr/local/tessera/pages rw - ext4 /dev/vda1 rw"
    );
    // As a runtime mounts it that puts volumes first: ours lies over it.
    let text = container(&[]).replace("102 100 0:99", "102 99 0:99");
    let text = text.replacen("102 99", &format!("{volume}\n102 99"), 1);
    assert_eq!(Mounts::parse(&text).allocations(Some(pages))[0].as_str(), ID);
    assert_eq!(damages(&text), [""; 0]);
    // In a pod without a share there is nothing else.
    assert_eq!(Mounts::parse(&volume).allocations(Some(pages)), []);
    // Another's pages, by the host's directories: nobody's word.
    let both = container(&[&volume.replace("253:1", "0:99").replace(
        &format!("/var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~empty-dir/v/{OTHER}"),
        &format!("/{OTHER}"),
    )]);
    assert_eq!(Mounts::parse(&both).allocations(Some(pages))[0].as_str(), ID);
    // Nor where there was one share for each container.
    assert_eq!(Mounts::parse(&old(&both)).allocations(Some(pages)), []);
}

/// As a kubelet and containerd 1.6 made them; what is beside the point is left out.
mod of_a_real_kubelet {
    use super::*;

    const OWN: &str = "\
221 177 254:0 /var/lib/kubelet/plugins/tessera.dev /var/lib/kubelet/plugins/tessera.dev rw,relatime master:1 - ext4 /dev/vda rw
222 221 0:74 / /var/lib/kubelet/plugins/tessera.dev/pages rw,nosuid,nodev,noexec,relatime master:3 - tmpfs tessera rw,size=8192k,mode=755
218 177 254:0 /var/lib/tessera /var/lib/tessera rw,relatime - ext4 /dev/vda rw
";

    /// The container `main` of the pod 68dce5fa-…, with volumes mounted where `{}` stands in the order.
    fn container(
        before: &str,
        over_preload: &str,
        over_shim: &str,
        over: &str,
        last: &str,
    ) -> String {
        format!(
            "\
432 331 0:149 / / rw,relatime - overlay overlay rw,lowerdir=/run/x/snapshots/3/fs,workdir=/run/x/work
448 434 254:0 /var/lib/kubelet/pods/68dce5fa-cd49-4bb4-8a58-d9236d24af06/containers/main/2c1ef3ed /dev/termination-log rw,relatime - ext4 /dev/vda rw
449 432 254:0 /var/lib/tessera/shim/5f181173e358d3be/ld.so.preload /etc/ld.so.preload ro,relatime - ext4 /dev/vda rw
{over_preload}455 432 254:0 /var/lib/tessera/shim/5f181173e358d3be/libtessera.so /usr/local/tessera/libtessera.so ro,relatime - ext4 /dev/vda rw
{over_shim}{before}500 {} 0:74 /27e527d77a4bc726f42a560ca0e41624 /usr/local/tessera/pages ro,relatime - tmpfs tessera rw,size=8192k,mode=755
{over}501 {} 0:74 /27e527d77a4bc726f42a560ca0e41624/usage /usr/local/tessera/pages/usage rw,nosuid,nodev,noexec,relatime - tmpfs tessera rw,size=8192k,mode=755
{last}",
            if before.is_empty() { 432 } else { 499 },
            if over.is_empty() { 500 } else { 502 },
        )
    }

    #[track_caller]
    fn check(text: &str, expected: &[&str]) {
        let own = Mounts::parse(OWN);
        let sources = Sources {
            pages: Source::of(&own, "/var/lib/kubelet/plugins/tessera.dev/pages").unwrap(),
            shim: Source::of(&own, "/var/lib/tessera/shim").unwrap(),
        };
        let mounts = Mounts::parse(text);
        let id = &mounts.allocations(Some(&sources.pages))[0];
        assert_eq!(id.as_str(), "27e527d77a4bc726f42a560ca0e41624");
        let (uid, name) = mounts.container().unwrap();
        assert_eq!((uid, name), ("68dce5fa-cd49-4bb4-8a58-d9236d24af06", "main"));
        let found = mounts.damages(id, true, &sources);
        let found: Vec<String> =
            found.iter().map(|damage| format!("{:?} {:?}", damage.part, damage.fault)).collect();
        assert_eq!(found, expected, "{text}");
    }

    const VOLUME: &str = "254:0 /var/lib/kubelet/pods/68dce5fa-cd49-4bb4-8a58-d9236d24af06/volumes/kubernetes.io~empty-dir/v";

    #[test]
    fn a_volume_that_lies_under_the_pages_harms_nothing() {
        check(&container("", "", "", "", ""), &[]);
        let line =
            format!("499 432 {VOLUME} /usr/local/tessera/pages rw,relatime - ext4 /dev/vda rw\n");
        check(&container(&line, "", "", "", ""), &[]);
        // A host's directory, and a place above: containerd mounts what has fewer parts first.
        let host = "499 432 254:0 /srv/x /usr/local/tessera/pages rw,relatime - ext4 /dev/vda rw\n";
        check(&container(host, "", "", "", ""), &[]);
        let above = format!("499 432 {VOLUME} /usr/local/tessera rw,relatime - ext4 /dev/vda rw\n");
        check(&container(&above, "", "", "", "").replace("455 432", "455 499"), &[]);
    }

    #[test]
    fn a_volume_that_lies_over_the_pages_is_seen() {
        // The usage page, which has more parts, is mounted last, and into the volume.
        let line =
            format!("502 500 {VOLUME} /usr/local/tessera/pages rw,relatime - ext4 /dev/vda rw\n");
        check(&container("", "", "", &line, ""), &["Pages Shadowed"]);
    }

    #[test]
    fn a_file_over_shim_preload_usage_or_quota_page_is_seen() {
        let shim = "541 455 254:0 /srv/so /usr/local/tessera/libtessera.so rw,relatime - ext4 /dev/vda rw\n";
        check(&container("", "", shim, "", ""), &["Shim Shadowed"]);
        let volume = "254:0 /var/lib/kubelet/pods/68dce5fa-cd49-4bb4-8a58-d9236d24af06/volumes/kubernetes.io~configmap/v/..2026_11_22_12_05_13.334232499/preload";
        let preload =
            format!("578 449 {volume} /etc/ld.so.preload ro,relatime - ext4 /dev/vda rw\n");
        check(&container("", &preload, "", "", ""), &["Preload Shadowed"]);
        let usage = "544 501 254:0 /srv/usage /usr/local/tessera/pages/usage rw,relatime - ext4 /dev/vda rw\n";
        check(&container("", "", "", "", usage), &["Usage Shadowed"]);
        let quota = format!(
            "462 500 {volume} /usr/local/tessera/pages/quota ro,relatime - ext4 /dev/vda rw\n"
        );
        check(&container("", "", "", "", &quota), &["Quota Shadowed"]);
    }
}

proptest! {
    #[test]
    fn nothing_makes_it_stumble(lines in prop::collection::vec("[0-9]{1,2} [0-9]{1,2} [0-9:]{1,3} [/a-z]{1,9} (/|/a|/usr/local/tessera/pages|/etc) (ro|rw)", 0..12)) {
        let text = lines.join("\n");
        let mounts = Mounts::parse(&text);
        let id = AllocationId::parse(ID).unwrap();
        prop_assert!(!mounts.damages(&id, true, &sources()).is_empty());
    }
}
