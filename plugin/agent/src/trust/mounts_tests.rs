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

fn pages() -> Source {
    let pages =
        Source::of(&Mounts::parse(OWN), "/var/lib/kubelet/plugins/tessera.dev/pages").unwrap();
    assert_eq!(pages, Source { device: "0:99".into(), root: String::new() });
    pages
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

fn allocations(text: &str) -> Vec<String> {
    let found = Mounts::parse(text).allocations(Some(&pages()));
    found.iter().map(ToString::to_string).collect()
}

#[test]
fn a_container_is_its_shares_whatever_lies_over_them() {
    let text = container(&[]);
    assert_eq!(allocations(&text), [ID]);
    assert_eq!(Mounts::parse(&text).container(), Some((UID, "main")));
    assert_eq!(allocations(&old(&text)), [ID], "of an older plugin");
    assert_eq!(
        allocations(&container(&[&beside("0:99", &format!("/{OTHER}"), OTHER)])),
        [ID, OTHER]
    );
    let over = "108 100 253:1 /v /usr/local/tessera/pages rw - ext4 /dev/vda1 rw";
    assert_eq!(allocations(&container(&[over])), [ID]);
    // Removed on the host, they are still ours.
    let removed = text.replace(&format!("0:99 /{ID} "), &format!("0:99 /{ID}//deleted "));
    assert_eq!(allocations(&removed), [ID]);
}

#[test]
fn what_is_mounted_beside_the_shares_and_is_none_does_not_count() {
    let volume = format!("/var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~secret/v");
    for (device, root, name) in [
        ("253:1", volume.as_str(), OTHER),
        ("253:1", volume.as_str(), "x"),
        // Ours under another's name, and another's of ours.
        ("0:99", &*format!("/{ID}"), OTHER),
        ("0:98", &*format!("/{OTHER}"), OTHER),
    ] {
        let text = container(&[&beside(device, root, name)]);
        assert_eq!(allocations(&text), [ID], "{device} {root} {name}");
    }
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
fn a_volume_that_is_named_like_an_allocation_makes_no_container_its() {
    let pages = &pages();
    let volume = format!(
        "99 100 253:1 /var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~empty-dir/v/{OTHER} \
         /usr/local/tessera/pages rw - ext4 /dev/vda1 rw"
    );
    // As a runtime mounts it that puts volumes first: ours lies over it.
    let text = container(&[]).replace("102 100 0:99", "102 99 0:99");
    let text = text.replacen("102 99", &format!("{volume}\n102 99"), 1);
    assert_eq!(Mounts::parse(&text).allocations(Some(pages))[0].as_str(), ID);
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

proptest! {
    #[test]
    fn nothing_makes_it_stumble(lines in prop::collection::vec("[0-9]{1,2} [0-9]{1,2} [0-9:]{1,3} [/a-z]{1,9} (/|/a|/usr/local/tessera/pages|/etc) (ro|rw)", 0..12)) {
        let text = lines.join("\n");
        let mounts = Mounts::parse(&text);
        prop_assert_eq!(mounts.allocations(Some(&pages())), []);
        let _ = Source::of(&mounts, "/usr/local/tessera/pages");
    }
}
