//! What CDI allows as a name. The specification's prose and its reference implementation differ in
//! places; here is what both take (CDI 1.1.0, "Kind" and "CDI Devices"; `pkg/parser`).

/// The kind of our devices, each of which is an allocation. Not that of the resource, which is not known of an
/// allocation adopted from its pages alone.
pub const SHARE_KIND: &str = "tessera.dev/share";

/// `vendor/class`, in its parts.
///
/// # Errors
/// What is wrong with it.
pub fn kind(text: &str) -> Result<(&str, &str), String> {
    let parts = text.split_once('/');
    let (vendor, class) = parts.ok_or_else(|| {
        format!("\"{text}\" is not a kind of CDI device, which is `vendor/class`")
    })?;
    let label = |label: &str| {
        label.len() <= 63
            && spelled(label, u8::is_ascii_alphanumeric, b"-")
            && !label.bytes().any(|byte| byte.is_ascii_uppercase())
    };
    let begins = vendor.as_bytes().first().is_some_and(u8::is_ascii_alphabetic);
    if vendor.len() > 253 || !begins || !vendor.split('.').all(label) {
        return Err(format!(
            "\"{vendor}\" is not a CDI vendor: a DNS name in lower case that begins with a letter"
        ));
    }
    if class.len() > 63 || !spelled(class, u8::is_ascii_alphabetic, b"-_.") {
        return Err(format!(
            "\"{class}\" is not a CDI class: a letter, then letters, digits, `-`, `_`, `.`, and a letter or digit at the \
             end, at most 63 characters"
        ));
    }
    Ok((vendor, class))
}

/// Begins as `first` says, ends with a letter or digit, and has only letters, digits and `extra`.
fn spelled(text: &str, first: fn(&u8) -> bool, extra: &[u8]) -> bool {
    let bytes = text.as_bytes();
    bytes.first().is_some_and(first)
        && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || extra.contains(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_specifications_examples() {
        assert_eq!(kind("vendor.com/foo"), Ok(("vendor.com", "foo")));
        assert!(kind("foo.bar.baz/foo-bar123.B_az").is_ok());
        for wrong in ["foo", "vendor.com/foo/", "vendor.com/foo/bar", "/gpu", "vendor.com/", ""] {
            assert!(kind(wrong).is_err(), "{wrong}");
        }
        for wrong in ["3com.com/gpu", "a..b/gpu", "-a.b/gpu", "A.b/gpu", "a.b/7gpu", "a.b/gpu-"] {
            assert!(kind(wrong).is_err(), "{wrong}");
        }
        let long = "a".repeat(64);
        assert!(kind(&format!("a.b/{long}")).is_err());
        assert!(kind(&format!("a.b/{}", &long[1..])).is_ok());
    }
}
