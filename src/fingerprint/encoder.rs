//! How the parts of a request are written into the hash so that none runs into the next.

use super::digest::Sink;

/// Writes self-delimiting fields into a hash, see the [module](super) for the encoding.
///
/// Small fields are gathered on the stack, because a hash call per length prefix costs more than
/// the hashing itself. What is gathered reaches the hash when the encoder is dropped.
pub(super) struct Encoder<'h> {
    hash: &'h mut dyn Sink,
    gathered: [u8; GATHERED],
    filled: usize,
}

impl<'h> Encoder<'h> {
    pub(super) fn new(hash: &'h mut dyn Sink) -> Self {
        Self {
            hash,
            gathered: [0; GATHERED],
            filled: 0,
        }
    }

    /// A single byte: a letter or a zero or one.
    pub(super) fn tag(&mut self, tag: u8) {
        self.bytes(&[tag]);
    }

    /// A length alone, where the bytes that it counts come in pieces.
    pub(super) fn length(&mut self, length: usize) {
        self.bytes(&(length as u64).to_le_bytes());
    }

    /// A length and that many bytes.
    pub(super) fn text(&mut self, text: &[u8]) {
        self.length(text.len());
        self.bytes(text);
    }

    /// Any number of texts; no line differs from one empty line.
    pub(super) fn lines<'l>(&mut self, lines: impl IntoIterator<Item = &'l [u8]>) {
        for line in lines {
            self.tag(1);
            self.text(line);
        }
        self.tag(0);
    }

    /// Bytes without a length: for what a field before them has announced, and for the last field.
    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        if bytes.len() > GATHERED - self.filled {
            self.flush();
            if bytes.len() >= GATHERED {
                self.hash.put(bytes);
                return;
            }
        }
        let end = self.filled + bytes.len();
        self.gathered[self.filled..end].copy_from_slice(bytes);
        self.filled = end;
    }

    fn flush(&mut self) {
        self.hash.put(&self.gathered[..self.filled]);
        self.filled = 0;
    }
}

impl Drop for Encoder<'_> {
    fn drop(&mut self) {
        self.flush();
    }
}

const GATHERED: usize = 256;

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    fn digest(write: impl FnOnce(&mut Encoder<'_>)) -> [u8; 32] {
        let mut hash = Sha256::new();
        write(&mut Encoder::new(&mut hash));
        hash.finalize().into()
    }

    #[test]
    fn gathering_changes_nothing_whatever_the_sizes() {
        for size in [
            0,
            1,
            GATHERED - 9,
            GATHERED - 8,
            GATHERED - 1,
            GATHERED,
            1000,
        ] {
            let bytes = vec![7; size];
            let mut plain = Sha256::new();
            for _ in 0..3 {
                plain.update((size as u64).to_le_bytes());
                plain.update(&bytes);
            }
            let gathered = digest(|encoder| (0..3).for_each(|_| encoder.text(&bytes)));
            assert_eq!(gathered, <[u8; 32]>::from(plain.finalize()), "size {size}");
        }
    }

    #[test]
    fn lines_tell_absent_from_empty_and_one_from_two() {
        let lines = |lines: &[&[u8]]| digest(|encoder| encoder.lines(lines.iter().copied()));
        let all = [
            lines(&[]),
            lines(&[b""]),
            lines(&[b"", b""]),
            lines(&[b"ab"]),
            lines(&[b"a", b"b"]),
        ];
        for (index, one) in all.iter().enumerate() {
            assert!(all[index + 1..].iter().all(|other| one != other));
        }
    }
}
