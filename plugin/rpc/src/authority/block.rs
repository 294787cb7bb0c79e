//! One HPACK header block, decoded and encoded again.

use loona_hpack::Decoder;

use super::Error;

/// The value every `:authority` gets.
const AUTHORITY: &[u8] = b"localhost";
/// SETTINGS_HEADER_TABLE_SIZE of the server: the initial value, RFC 9113 §6.5.2.
const TABLE_SIZE: usize = 4096;
/// Most bytes of a decoded header list, counted as SETTINGS_MAX_HEADER_LIST_SIZE is: 32 more a field.
/// The server itself takes 16 KiB.
pub(super) const MAX_LIST: usize = 32 * 1024;

/// Follows the client's dynamic table over the life of a connection.
pub(super) struct Translator {
    decoder: Decoder<'static>,
}

impl Translator {
    pub(super) fn new() -> Self {
        let mut decoder = Decoder::new();
        decoder.set_max_allowed_table_size(TABLE_SIZE);
        Self { decoder }
    }

    /// Appends the translation of `block` to `out`.
    pub(super) fn translate(&mut self, block: &[u8], out: &mut Vec<u8>) -> Result<(), Error> {
        let mut list = 0_usize;
        self.decoder
            .decode_with_cb(block, |name, value| {
                list = list.saturating_add(name.len() + value.len() + 32);
                // The callback cannot stop the decoder, but it can stop gathering.
                if list <= MAX_LIST {
                    let value = if *name == *b":authority" { AUTHORITY } else { &value };
                    put_literal(out, &name, value);
                }
            })
            .map_err(|error| Error::Malformed(error.to_string()))?;
        if list > MAX_LIST { Err(Error::TooLarge) } else { Ok(()) }
    }
}

impl std::fmt::Debug for Translator {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Translator").finish_non_exhaustive()
    }
}

/// A literal header field without indexing and with a new name, RFC 7541 §6.2.2, not Huffman coded.
pub(super) fn put_literal(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    out.push(0);
    put_string(out, name);
    put_string(out, value);
}

/// A string literal, RFC 7541 §5.2.
fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    let mut length = string.len();
    if length < 0x7f {
        out.push(low_byte(length));
    } else {
        out.push(0x7f);
        length -= 0x7f;
        while length >= 0x80 {
            out.push(low_byte(length) | 0x80);
            length >>= 7;
        }
        out.push(low_byte(length));
    }
    out.extend_from_slice(string);
}

fn low_byte(number: usize) -> u8 {
    number.to_le_bytes()[0]
}
