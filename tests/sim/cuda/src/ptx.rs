//! Reading images: entries of PTX text; cubins and fatbins are opaque.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Image {
    /// A cubin or fatbin of so many bytes: any name exists.
    Opaque(u64),
    /// PTX: these entries.
    Ptx(BTreeMap<String, Entry>),
}

pub(crate) const ELF: [u8; 4] = *b"\x7fELF";
const FATBIN: [u8; 4] = 0xBA55_ED50u32.to_le_bytes();
/// `__fatBinC_Wrapper_t`, which `cuModuleLoadFatBinary` also takes.
const FATBIN_WRAPPER: [u8; 4] = 0x4662_43B1u32.to_le_bytes();

impl Image {
    /// An image in the caller's memory: a binary one by its magic, else terminated text.
    pub(crate) fn read(image: *const c_void) -> Option<Image> {
        if image.is_null() {
            return None;
        }
        // SAFETY: the caller promises an image; every kind has at least four bytes ("\0" of an
        // empty text apart, so bytes are read one at a time).
        let magic = unsafe {
            let bytes = image.cast::<u8>();
            let mut magic = [0u8; 4];
            for (i, to) in magic.iter_mut().enumerate() {
                *to = *bytes.add(i);
                if *to == 0 && i == 0 {
                    return None;
                }
            }
            magic
        };
        if matches!(magic, ELF | FATBIN | FATBIN_WRAPPER) {
            // SAFETY: the caller promises an image, which these begin.
            return Some(Image::Opaque(unsafe { size(image.cast()) }));
        }
        // SAFETY: not binary, so the manual says that it is a NUL-terminated string.
        Image::of(unsafe { CStr::from_ptr(image.cast()) }.to_bytes())
    }

    pub(crate) fn of(bytes: &[u8]) -> Option<Image> {
        if bytes.starts_with(&ELF)
            || bytes.starts_with(&FATBIN)
            || bytes.starts_with(&FATBIN_WRAPPER)
        {
            return Some(Image::Opaque(bytes.len() as u64));
        }
        let text = std::str::from_utf8(bytes.strip_suffix(b"\0").unwrap_or(bytes)).ok()?;
        text.contains(".version").then(|| parse(text))
    }

    /// The kernel of this name; of a binary's nothing is known.
    pub(crate) fn entry(&self, name: &str) -> Option<Entry> {
        match self {
            Image::Opaque(_) => Some(Entry::default()),
            Image::Ptx(entries) => entries.get(name).cloned(),
        }
    }

    /// Bytes of code; 0 of text, whose code is not known.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Image::Opaque(bytes) => *bytes,
            Image::Ptx(..) => 0,
        }
    }

    pub(crate) fn entries(&self) -> Vec<&str> {
        match self {
            Image::Opaque(_) => Vec::new(),
            Image::Ptx(entries) => entries.keys().map(String::as_str).collect(),
        }
    }
}

/// Bytes of a cubin up to the end of its table of sections, which is its last part, or of a fatbin by its header.
///
/// # Safety
/// `image` begins a cubin, a fatbin or a fatbin's wrapper.
unsafe fn size(image: *const u8) -> u64 {
    // SAFETY: each field is read only of an image that has it (caller), as bytes: alignment does not matter.
    unsafe {
        let word = |at: usize| u64::from_le_bytes(image.add(at).cast::<[u8; 8]>().read());
        let half =
            |at: usize| u64::from(u16::from_le_bytes(image.add(at).cast::<[u8; 2]>().read()));
        match image.cast::<[u8; 4]>().read() {
            FATBIN_WRAPPER => match usize::try_from(word(8)).unwrap_or(0) {
                0 => 0,
                data => size(data as *const u8),
            },
            // The magic, the version, the header's size and that of what follows.
            FATBIN => half(6).saturating_add(word(8)),
            // Of 64 bits (elf(5)): `e_shoff`, `e_shentsize`, `e_shnum`.
            _ if image.add(4).read() == 2 => word(40).saturating_add(half(58) * half(60)),
            _ => 0,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    pub parameters: Vec<Parameter>,
    /// Bytes of local memory that it declares for each thread.
    pub local_bytes: u64,
    /// It lets the kernel behind it begin before it ends (PTX ISA, `griddepcontrol`).
    pub lets_go: bool,
}

/// Where a kernel parameter lies among the parameters, and its size, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parameter {
    /// From the first parameter's beginning.
    pub offset: u64,
    pub size: u64,
}

fn parse(text: &str) -> Image {
    let mut entries = BTreeMap::<_, Entry>::new();
    let mut at = 0;
    let mut within = None;
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%');
    for whole in text.split_inclusive('\n') {
        let (start, line) = (at, whole);
        at += whole.len();
        let line = line.split("//").next().unwrap_or("");
        if let Some((_, rest)) = line.split_once(".entry") {
            let rest = rest.trim_start();
            let name = &rest[..rest.find(|c| !is_name(c)).unwrap_or(rest.len())];
            if !name.is_empty() {
                let parameters = parameters(&text[start..], name);
                entries.insert(name.to_owned(), Entry { parameters, ..Entry::default() });
                within = Some(name);
            }
        } else if line.contains(".func") {
            within = None;
        } else if line.contains("griddepcontrol.launch_dependents") {
            if let Some(entry) = within.and_then(|name| entries.get_mut(name)) {
                entry.lets_go = true;
            }
        } else if let Some(rest) = line.trim_start().strip_prefix(".local ")
            && let Some(size) = size_of_variable(rest)
            && let Some(entry) = within.and_then(|name| entries.get_mut(name))
        {
            entry.local_bytes = entry.local_bytes.saturating_add(size);
        }
    }
    Image::Ptx(entries)
}

/// The parameters between the parentheses behind an entry's name, if it has any.
fn parameters(text: &str, name: &str) -> Vec<Parameter> {
    let list = text.split_once(name).map_or("", |(_, rest)| rest.trim_start());
    let Some(list) = list.strip_prefix('(').and_then(|rest| rest.split(')').next()) else {
        return Vec::new();
    };
    let mut end = 0u64;
    let mut all = Vec::new();
    for declaration in list.split(',').filter_map(|p| p.trim().strip_prefix(".param")) {
        let Some(size) = size_of_variable(declaration) else { continue };
        let words: Vec<_> = declaration.split_whitespace().collect();
        // Behind `.ptr` it is what the pointer points to that is aligned.
        let own = words.split(|w| *w == ".ptr").next().unwrap_or(&[]);
        let explicit = own.iter().position(|w| *w == ".align").and_then(|i| own.get(i + 1));
        let align = explicit.and_then(|n| n.parse().ok()).unwrap_or(size).max(1);
        let offset = end.next_multiple_of(align);
        end = offset + size;
        all.push(Parameter { offset, size });
    }
    all
}

/// Of `.align 4 .b8 name[16];`, `.u32 name`, in bytes.
fn size_of_variable(rest: &str) -> Option<u64> {
    let declaration = rest.split(['=', ';']).next()?.trim();
    let last = declaration.split_whitespace().next_back()?;
    // `.u64 .ptr .global name`: attributes of a pointer may follow the type.
    let bits = |word: &str| -> Option<u64> {
        word.strip_prefix('.')?.trim_start_matches(|c: char| c.is_ascii_alphabetic()).parse().ok()
    };
    let bits = declaration.split_whitespace().find_map(bits)?;
    let count = last.split('[').skip(1).try_fold(1u64, |n, dimension| {
        n.checked_mul(dimension.trim_end_matches(']').parse().ok()?)
    })?;
    (bits / 8).checked_mul(count)
}

#[cfg(test)]
mod tests {
    use super::Image;

    #[test]
    fn entries_are_read() {
        let image = Image::of(
            b".version 8.0\n.target sm_90\n.visible .global .align 4 .b8 table[16];\n\
              .visible .const .u32 one = 1;\n.visible .entry add(\n .param .u64 a)\n{ ret; }\n\
              // .entry not_this\n.entry  mul()\n",
        )
        .unwrap();
        assert_eq!(image.entries(), ["add", "mul"]);
        assert_eq!(image.entry("not_this"), None);
    }

    #[test]
    fn parameters_have_places() {
        let image = Image::of(
            b".version 8.0\n.visible .entry axpy(\n\t.param .f32 axpy_a,\n\t.param .u64 .ptr .global axpy_x,\n\
              \t.param .align 4 .b8 axpy_s[12]\n)\n.maxntid 1\n{ ret; }\n.entry none()\n",
        )
        .unwrap();
        let places: Vec<_> =
            image.entry("axpy").unwrap().parameters.iter().map(|p| (p.offset, p.size)).collect();
        assert_eq!(places, [(0, 4), (8, 8), (16, 12)]);
        assert_eq!(image.entry("none").unwrap(), super::Entry::default());
        assert_eq!(image.entries(), ["axpy", "none"]);
    }

    #[test]
    fn kernels_that_let_the_next_begin_say_so() {
        let image = Image::of(
            b".version 7.8\n.entry a()\n{\n\tgriddepcontrol.launch_dependents;\n\tret;\n}\n.entry b()\n{ ret; }\n",
        )
        .unwrap();
        assert_eq!(["a", "b"].map(|name| image.entry(name).unwrap().lets_go), [true, false]);
    }

    #[test]
    fn text_that_is_not_ptx_is_refused() {
        assert_eq!(Image::of(b"hello"), None);
        assert_eq!(Image::of(&[0xff, 0xfe, 0, 1]), None);
    }
}
