//! JSON pointers (RFC 6901): which values of a document a recipe chooses or leaves out.

use std::fmt;

/// A pointer, parsed into its reference tokens.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Pointer {
    tokens: Vec<Box<str>>,
}

/// Pointers in order, none twice and none inside another: the outer one says it all.
#[derive(Clone, Default)]
pub(super) struct PointerSet {
    pointers: Vec<Pointer>,
}

/// Where a walk through a document stands, seen from a [`PointerSet`].
#[derive(Clone, Copy)]
pub(super) struct Position<'s> {
    // The pointers into the value at hand, all longer than the way to it.
    inside: &'s [Pointer],
    depth: usize,
}

impl Pointer {
    /// Parses a pointer. The error goes on from the name of a setter.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let tokens = match text.strip_prefix('/') {
            Some(rest) => rest
                .split('/')
                .map(|token| match token {
                    "*" => Err(format!("got {text:?}: JSON pointers have no wildcards")),
                    _ => unescape(token).ok_or_else(|| {
                        format!("got {text:?}: a JSON pointer writes `~` as `~0` and `/` as `~1`")
                    }),
                })
                .collect::<Result<_, _>>()?,
            None if text.is_empty() => Vec::new(),
            None => return Err(format!("got {text:?}: a JSON pointer begins with `/`")),
        };
        Ok(Self { tokens })
    }

    pub(super) fn tokens(&self) -> impl Iterator<Item = &str> {
        self.tokens.iter().map(|token| &**token)
    }

    /// Whether it points to what `other` points to, or to a value round it.
    pub(super) fn covers(&self, other: &Self) -> bool {
        other.tokens.starts_with(&self.tokens)
    }

    /// Whether it points to the whole document.
    pub(super) fn is_root(&self) -> bool {
        self.tokens.is_empty()
    }
}

/// The pointer as text; parsing gives the same pointer again.
impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tokens.iter().try_for_each(|token| {
            let escaped = token.replace('~', "~0").replace('/', "~1");
            write!(f, "/{escaped}")
        })
    }
}

impl PointerSet {
    pub(super) fn extend(&mut self, pointers: impl IntoIterator<Item = Pointer>) {
        self.pointers.extend(pointers);
        // In this order an outer pointer stands right before all that are inside it.
        self.pointers.sort();
        self.pointers.dedup_by(|inner, outer| outer.covers(inner));
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Pointer> {
        self.pointers.iter()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pointers.is_empty()
    }

    /// The start of a walk, at the document. The set must not hold the pointer to it.
    pub(super) fn root(&self) -> Position<'_> {
        Position {
            inside: &self.pointers,
            depth: 0,
        }
    }
}

impl<'s> Position<'s> {
    /// One step into a member of an object; `None` if a pointer points to it.
    pub(super) fn member(self, name: &[u8]) -> Option<Self> {
        self.step(|token| token.as_bytes() == name)
    }

    /// One step into an element of an array; `None` if a pointer points to it.
    pub(super) fn element(self, index: usize) -> Option<Self> {
        self.step(|token| element_index(token) == Some(index))
    }

    fn step(self, matches: impl Fn(&str) -> bool) -> Option<Self> {
        let here = |pointer: &&Pointer| pointer.tokens.get(self.depth).is_some_and(|t| matches(t));
        // Sorted, so the ones that match stand together.
        let before = self.inside.iter().take_while(|p| !here(p)).count();
        let length = self.inside[before..].iter().take_while(here).count();
        let inside = &self.inside[before..before + length];
        let depth = self.depth + 1;
        let pointed_to = inside.iter().any(|pointer| pointer.tokens.len() == depth);
        (!pointed_to).then_some(Position { inside, depth })
    }
}

/// The element that a token names in an array: neither `-` nor a number with leading zeros names
/// one (RFC 6901, section 4).
pub(super) fn element_index(token: &str) -> Option<usize> {
    let plain = token.bytes().all(|byte| byte.is_ascii_digit());
    let leading_zero = token.len() > 1 && token.starts_with('0');
    token.parse().ok().filter(|_| plain && !leading_zero)
}

fn unescape(token: &str) -> Option<Box<str>> {
    let mut name = String::with_capacity(token.len());
    let mut chars = token.chars();
    while let Some(char) = chars.next() {
        name.push(match char {
            '~' => match chars.next()? {
                '0' => '~',
                '1' => '/',
                _ => return None,
            },
            _ => char,
        });
    }
    Some(name.into_boxed_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(pointers: &[&str]) -> PointerSet {
        let mut set = PointerSet::default();
        set.extend(pointers.iter().map(|text| Pointer::parse(text).unwrap()));
        set
    }

    fn texts(set: &PointerSet) -> Vec<String> {
        set.iter().map(Pointer::to_string).collect()
    }

    #[test]
    fn a_pointer_is_printed_as_it_was_written() {
        for text in [
            "",
            "/",
            "/a",
            "/a/0/b",
            "//",
            "/a~1b/~0",
            "/~01",
            "/-",
            "/a b/\u{e4}",
        ] {
            assert_eq!(Pointer::parse(text).unwrap().to_string(), text);
        }
        let tokens = Pointer::parse("/a~1b/~01").unwrap();
        assert_eq!(tokens.tokens().collect::<Vec<_>>(), ["a/b", "~1"]);
    }

    #[test]
    fn what_is_no_pointer_is_refused() {
        for text in [
            "a",
            "#/a",
            "a/b",
            "/~",
            "/~2",
            "/a/~",
            "/*",
            "/items/*/id",
            "$.a",
        ] {
            assert!(Pointer::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn array_indexes_have_one_spelling() {
        assert_eq!(element_index("0"), Some(0));
        assert_eq!(element_index("120"), Some(120));
        for token in [
            "",
            "-",
            "00",
            "01",
            "+1",
            "-1",
            "1 ",
            "99999999999999999999999",
        ] {
            assert_eq!(element_index(token), None, "{token}");
        }
    }

    #[test]
    fn a_set_keeps_outer_pointers_in_order_once() {
        let many = set(&["/b", "/a/x", "/ab", "/a/x/y", "/b", "/a/w"]);
        assert_eq!(texts(&many), ["/a/w", "/a/x", "/ab", "/b"]);
        assert_eq!(texts(&set(&["/a", ""])), [""]);
    }

    #[test]
    fn a_walk_ends_where_a_pointer_points_and_nowhere_else() {
        let set = set(&["/a/x", "/a/y/0", "/b"]);
        let root = set.root();
        assert!(root.member(b"b").is_none());
        assert!(root.member(b"x").is_some());
        assert!(root.element(0).is_some());
        let a = root.member(b"a").unwrap();
        assert!(a.member(b"x").is_none());
        assert!(a.member(b"b").is_some());
        let y = a.member(b"y").unwrap();
        assert!(y.element(0).is_none());
        assert!(y.member(b"0").is_none());
        assert!(y.element(1).is_some());
        assert!(a.member(b"z").unwrap().element(0).is_some());
    }
}
