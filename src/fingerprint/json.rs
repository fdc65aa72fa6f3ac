//! JSON by value: what two documents have in common that differ only in how they are written.

use super::encoder::Encoder;
use super::pointer::{Pointer, PointerSet, Position, element_index};

/// The strings and numbers at these pointers, as text. `None` if one of them is not there, or if the
/// document can be understood in two ways: see [`Document::parse`].
pub(crate) fn scalars(body: &[u8], pointers: &[Pointer]) -> Option<Vec<String>> {
    let document = Document::parse(body)?;
    let nothing = PointerSet::default();
    let scalar = |pointer| {
        let (node, _) = document.find(pointer, nothing.root())?;
        let is_scalar = matches!(node, Node::Number(_) | Node::Plain(_) | Node::Escaped(_));
        let text = String::from_utf8(document.text(node).to_vec());
        text.ok().filter(|_| is_scalar)
    };
    pointers.iter().map(scalar).collect()
}

/// Which values of a document are hashed: those chosen, or all, without those left out.
#[derive(Clone, Default)]
pub(super) struct Selection {
    /// Empty for the whole document.
    pub(super) only: PointerSet,
    pub(super) except: PointerSet,
}

/// A document that was read to its end and found unambiguous.
///
/// Numbers are kept as they are written: a parser that makes them `f64` would take
/// 9007199254740993 for 9007199254740992. Strings are compared by their characters, without
/// Unicode normalisation.
pub(super) struct Document<'b> {
    body: &'b [u8],
    // The characters of strings that are written with escapes.
    unescaped: Vec<u8>,
    // The elements of each array, and name and value in turn of each object, side by side.
    nodes: Vec<Node>,
    root: Node,
}

impl<'b> Document<'b> {
    /// Reads a document (RFC 8259), in time that is linear in its length but for the sorting of
    /// names. `None` if it is not JSON, not UTF-8, begins with a byte order mark, is nested deeper
    /// than [`MAX_DEPTH`], has the same name twice in an object or half a surrogate pair in a
    /// string: all that two readers may understand differently.
    pub(super) fn parse(body: &'b [u8]) -> Option<Self> {
        u32::try_from(body.len()).ok()?;
        std::str::from_utf8(body).ok()?;
        let mut parser = Parser {
            body,
            at: 0,
            unescaped: Vec::new(),
            nodes: Vec::new(),
            open: Vec::new(),
        };
        let root = parser.value(0)?;
        (parser.at == body.len()).then_some(Self {
            body,
            unescaped: parser.unescaped,
            nodes: parser.nodes,
            root,
        })
    }

    /// Writes the selected values. How many there are is fixed by the selection, and each says
    /// whether it is there, so that absent differs from null.
    pub(super) fn write(&self, selection: &Selection, encoder: &mut Encoder<'_>) {
        if selection.only.is_empty() {
            return self.write_value(self.root, selection.except.root(), encoder);
        }
        for pointer in selection.only.iter() {
            let found = self.find(pointer, selection.except.root());
            encoder.tag(u8::from(found.is_some()));
            if let Some((node, position)) = found {
                self.write_value(node, position, encoder);
            }
        }
    }

    fn find<'s>(&self, pointer: &Pointer, mut at: Position<'s>) -> Option<(Node, Position<'s>)> {
        let mut node = self.root;
        for token in pointer.tokens() {
            (node, at) = match node {
                Node::Array(span) => {
                    let index = element_index(token)?;
                    (*self.children(span).get(index)?, at.element(index)?)
                }
                Node::Object(span) => {
                    let (members, _) = self.children(span).as_chunks::<2>();
                    let name = token.as_bytes();
                    let found = members.binary_search_by(|[key, _]| self.text(*key).cmp(name));
                    (members[found.ok()?][1], at.member(name)?)
                }
                _ => return None,
            };
        }
        Some((node, at))
    }

    // As deep as the document, which the parser has limited.
    fn write_value(&self, node: Node, at: Position<'_>, encoder: &mut Encoder<'_>) {
        match node {
            Node::Null => encoder.tag(b'n'),
            Node::False => encoder.tag(b'f'),
            Node::True => encoder.tag(b't'),
            Node::Number(_) => {
                encoder.tag(b'd');
                encoder.text(self.text(node));
            }
            Node::Plain(_) | Node::Escaped(_) => {
                encoder.tag(b's');
                encoder.text(self.text(node));
            }
            Node::Array(span) => {
                encoder.tag(b'[');
                for (index, element) in self.children(span).iter().enumerate() {
                    if let Some(at) = at.element(index) {
                        self.write_value(*element, at, encoder);
                    }
                }
                encoder.tag(b']');
            }
            Node::Object(span) => {
                encoder.tag(b'{');
                for [name, value] in self.children(span).as_chunks::<2>().0 {
                    if let Some(at) = at.member(self.text(*name)) {
                        encoder.tag(b's');
                        encoder.text(self.text(*name));
                        self.write_value(*value, at, encoder);
                    }
                }
                encoder.tag(b'}');
            }
        }
    }

    fn children(&self, span: Span) -> &[Node] {
        span.of(&self.nodes)
    }

    fn text(&self, node: Node) -> &[u8] {
        node.text(self.body, &self.unescaped)
    }
}

#[derive(Clone, Copy)]
enum Node {
    Null,
    False,
    True,
    /// As it is written.
    Number(Span),
    /// A string without escapes, in the body.
    Plain(Span),
    /// A string that had escapes, in [`Document::unescaped`].
    Escaped(Span),
    /// The elements, in [`Document::nodes`].
    Array(Span),
    /// Name and value in turn, sorted by name, in [`Document::nodes`].
    Object(Span),
}

impl Node {
    fn text<'t>(self, body: &'t [u8], unescaped: &'t [u8]) -> &'t [u8] {
        match self {
            Self::Number(span) | Self::Plain(span) => span.of(body),
            Self::Escaped(span) => span.of(unescaped),
            _ => &[],
        }
    }
}

// Half the size of a range of `usize`: a hostile body is made of nodes.
#[derive(Clone, Copy)]
struct Span {
    start: u32,
    end: u32,
}

impl Span {
    /// `None` past 4 GiB, which no body in memory reaches in practice.
    fn new(start: usize, end: usize) -> Option<Self> {
        Some(Self {
            start: u32::try_from(start).ok()?,
            end: u32::try_from(end).ok()?,
        })
    }

    fn of<T>(self, all: &[T]) -> &[T] {
        all.get(self.start as usize..self.end as usize)
            .unwrap_or_default()
    }
}

struct Parser<'b> {
    body: &'b [u8],
    at: usize,
    unescaped: Vec<u8>,
    nodes: Vec<Node>,
    // The children so far of every array and object that is not closed yet.
    open: Vec<Node>,
}

impl Parser<'_> {
    /// One value and the white space round it.
    fn value(&mut self, depth: usize) -> Option<Node> {
        self.skip_white_space();
        let node = match self.peek()? {
            b'n' => self.literal(b"null", Node::Null),
            b'f' => self.literal(b"false", Node::False),
            b't' => self.literal(b"true", Node::True),
            b'"' => self.string(),
            b'[' if depth < MAX_DEPTH => self.array(depth + 1),
            b'{' if depth < MAX_DEPTH => self.object(depth + 1),
            b'-' | b'0'..=b'9' => self.number(),
            _ => None,
        }?;
        self.skip_white_space();
        Some(node)
    }

    fn array(&mut self, depth: usize) -> Option<Node> {
        let first = self.open.len();
        self.children(b']', |parser| {
            let element = parser.value(depth)?;
            parser.open.push(element);
            Some(())
        })?;
        self.close(first).map(Node::Array)
    }

    fn object(&mut self, depth: usize) -> Option<Node> {
        let first = self.open.len();
        self.children(b'}', |parser| {
            parser.skip_white_space();
            let name = parser.string()?;
            parser.skip_white_space();
            parser.expect(b':')?;
            // Below its value's own children, which are gone when the value is read.
            parser.open.push(name);
            let value = parser.value(depth)?;
            parser.open.push(value);
            Some(())
        })?;
        let text = |node: Node| node.text(self.body, &self.unescaped);
        let (members, _) = self.open[first..].as_chunks_mut::<2>();
        members.sort_unstable_by(|[a, _], [b, _]| text(*a).cmp(text(*b)));
        let repeated = |pair: &[[Node; 2]]| text(pair[0][0]) == text(pair[1][0]);
        if members.windows(2).any(repeated) {
            return None;
        }
        self.close(first).map(Node::Object)
    }

    /// What stands between an opening bracket and `end`: nothing, or children with commas between.
    fn children(&mut self, end: u8, mut child: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.at += 1;
        self.skip_white_space();
        if self.peek()? == end {
            self.at += 1;
            return Some(());
        }
        loop {
            child(self)?;
            let next = self.peek()?;
            self.at += 1;
            match next {
                b',' => {}
                next if next == end => return Some(()),
                _ => return None,
            }
        }
    }

    /// Moves the children of the innermost open array or object to where they stay.
    fn close(&mut self, first: usize) -> Option<Span> {
        let start = self.nodes.len();
        self.nodes.extend(self.open.drain(first..));
        Span::new(start, self.nodes.len())
    }

    fn literal(&mut self, text: &[u8], node: Node) -> Option<Node> {
        self.body[self.at..].starts_with(text).then(|| {
            self.at += text.len();
            node
        })
    }

    fn number(&mut self) -> Option<Node> {
        let start = self.at;
        self.accept(b"-");
        if !self.accept(b"0") {
            self.digits()?;
        }
        if self.accept(b".") {
            self.digits()?;
        }
        if self.accept(b"eE") {
            self.accept(b"+-");
            self.digits()?;
        }
        Span::new(start, self.at).map(Node::Number)
    }

    fn digits(&mut self) -> Option<()> {
        let rest = &self.body[self.at..];
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        self.at += digits;
        (digits > 0).then_some(())
    }

    fn string(&mut self) -> Option<Node> {
        self.expect(b'"')?;
        let start = self.plain_characters();
        if self.accept(b"\"") {
            return Span::new(start, self.at - 1).map(Node::Plain);
        }
        let first = self.unescaped.len();
        let mut plain = start;
        loop {
            self.unescaped.extend(&self.body[plain..self.at]);
            if self.accept(b"\"") {
                return Span::new(first, self.unescaped.len()).map(Node::Escaped);
            }
            self.expect(b'\\')?;
            let char = self.escape()?;
            let mut utf8 = [0; 4];
            self.unescaped
                .extend(char.encode_utf8(&mut utf8).as_bytes());
            plain = self.plain_characters();
        }
    }

    /// Goes on to the next quote, backslash or control character, and says where it began.
    fn plain_characters(&mut self) -> usize {
        let start = self.at;
        let special = |byte: &u8| matches!(byte, b'"' | b'\\' | 0..=0x1f);
        let rest = &self.body[start..];
        self.at += rest.iter().position(special).unwrap_or(rest.len());
        start
    }

    /// What comes after a backslash.
    fn escape(&mut self) -> Option<char> {
        let letter = self.peek()?;
        self.at += 1;
        Some(match letter {
            b'"' => '"',
            b'\\' => '\\',
            b'/' => '/',
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let first = self.code_unit()?;
                if !(0xd800..0xdc00).contains(&first) {
                    return char::from_u32(first);
                }
                self.expect(b'\\')?;
                self.expect(b'u')?;
                let second = self.code_unit()?;
                let low = second.checked_sub(0xdc00).filter(|low| *low < 0x400)?;
                return char::from_u32(0x10000 + ((first - 0xd800) << 10) + low);
            }
            _ => return None,
        })
    }

    fn code_unit(&mut self) -> Option<u32> {
        let digits = self.body.get(self.at..self.at + 4)?;
        self.at += 4;
        digits.iter().try_fold(0, |unit, digit| {
            Some(unit << 4 | char::from(*digit).to_digit(16)?)
        })
    }

    fn skip_white_space(&mut self) {
        let rest = &self.body[self.at..];
        let white = |byte: &&u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        self.at += rest.iter().take_while(white).count();
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        self.accept(&[byte]).then_some(())
    }

    fn accept(&mut self, any_of: &[u8]) -> bool {
        let accepted = self.peek().is_some_and(|byte| any_of.contains(&byte));
        self.at += usize::from(accepted);
        accepted
    }

    fn peek(&self) -> Option<u8> {
        self.body.get(self.at).copied()
    }
}

/// How deep arrays and objects may be nested. It also bounds the recursion of this module.
pub(super) const MAX_DEPTH: usize = 128;

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    fn digest(body: &[u8], selection: &Selection) -> Option<[u8; 32]> {
        let document = Document::parse(body)?;
        let mut hash = Sha256::new();
        document.write(selection, &mut Encoder::new(&mut hash));
        Some(hash.finalize().into())
    }

    fn value(text: &str) -> [u8; 32] {
        digest(text.as_bytes(), &Selection::default()).expect(text)
    }

    fn only(text: &str, pointers: &[&str]) -> [u8; 32] {
        let mut selection = Selection::default();
        let pointers = pointers.iter().map(|text| Pointer::parse(text).unwrap());
        selection.only.extend(pointers);
        digest(text.as_bytes(), &selection).expect(text)
    }

    fn except(text: &str, pointers: &[&str]) -> [u8; 32] {
        let mut selection = Selection::default();
        let pointers = pointers.iter().map(|text| Pointer::parse(text).unwrap());
        selection.except.extend(pointers);
        digest(text.as_bytes(), &selection).expect(text)
    }

    fn assert_unreadable(body: impl AsRef<[u8]>) {
        let body = body.as_ref();
        assert!(Document::parse(body).is_none(), "{}", body.escape_ascii());
    }

    fn assert_all_differ(texts: &[&str]) {
        for (index, one) in texts.iter().enumerate() {
            for other in &texts[..index] {
                assert_ne!(value(one), value(other), "{one} {other}");
            }
        }
    }

    #[test]
    fn the_order_of_members_and_white_space_make_no_difference() {
        let one = r#"{"a":1,"b":{"c":[true,{"d":null,"e":""}],"f":2},"":3}"#;
        let other = "\r\n{\t\"\" : 3,\n\"b\": { \"f\":2 , \"c\":[ true , {\"e\":\"\",\"d\":null} ] },\"a\":1 } ";
        assert_eq!(value(one), value(other));
    }

    #[test]
    fn values_that_differ_are_told_apart() {
        assert_all_differ(&[
            "null",
            "true",
            "false",
            "0",
            "-0",
            "1",
            "1.0",
            "1e0",
            "1E0",
            "10",
            "\"\"",
            "\"1\"",
            "\"null\"",
            "[]",
            "{}",
            "[null]",
            "[[]]",
            "[[],[]]",
            "[1,2]",
            "[2,1]",
            "[12]",
            "[1,[2]]",
            "[[1],2]",
            r#"{"a":null}"#,
            r#"{"a":1}"#,
            r#"{"a":"1"}"#,
            r#"{"a":{}}"#,
            r#"{"a":[]}"#,
            r#"[{"a":1}]"#,
            r#"{"a":1,"b":2}"#,
            r#"{"a":2,"b":1}"#,
            r#"{"a":{"b":2}}"#,
            r#"["a",1]"#,
            r#"["a","b"]"#,
            r#"["ab"]"#,
            r#"[{"a":1},{"b":2}]"#,
            r#"[{"a":1,"b":2}]"#,
        ]);
    }

    #[test]
    fn numbers_lose_no_digit() {
        assert_all_differ(&[
            "9007199254740992",
            "9007199254740993",
            "0.1",
            "0.10",
            "0.1000000000000000055511151231257827",
            "1e400",
            "1e401",
            "123456789012345678901234567890",
            "123456789012345678901234567891",
        ]);
    }

    #[test]
    fn strings_are_compared_by_their_characters() {
        for (one, other) in [
            (r#""a""#, r#""\u0061""#),
            (r#""/""#, r#""\/""#),
            (
                r#""\n\t\r\b\f\"\\""#,
                r#""\u000A\u0009\u000d\u0008\u000C\u0022\u005c""#,
            ),
            ("\"\u{1f600}x\"", r#""\uD83D\uDE00x""#),
            ("\"\u{10ffff}\"", r#""\uDBFF\uDFFF""#),
            ("\"\u{10000}\"", r#""\ud800\udc00""#),
            (r#"{"b":1,"a":2}"#, r#"{"\u0061":2,"b":1}"#),
        ] {
            assert_eq!(value(one), value(other), "{one} {other}");
        }
        // Composed and decomposed, and one backslash or two.
        assert_all_differ(&[
            "\"\u{e4}\"",
            "\"a\u{308}\"",
            r#""\\u0061""#,
            r#""a""#,
            r#""\u0000""#,
        ]);
    }

    #[test]
    fn what_is_not_json_is_unreadable() {
        for body in [
            "",
            " ",
            "nul",
            "nulll",
            "True",
            "NaN",
            "-",
            "+1",
            "01",
            "-01",
            "1.",
            ".1",
            "1.e1",
            "1e",
            "1e+",
            "0x1",
            "1 2",
            "[",
            "]",
            "[1",
            "[1,",
            "[1,]",
            "[,1]",
            "[1 2]",
            "{",
            "}",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1",
            "{\"a\":1,}",
            "{,}",
            "{a:1}",
            "{1:1}",
            "{'a':1}",
            "{\"a\" 1}",
            "[}",
            "{]",
            "\"",
            "\"a",
            "'a'",
            "\"\\\"",
            "\"\\x\"",
            "\"\\u12\"",
            "\"\\u123g\"",
            "\"\\u+123\"",
            "\"\n\"",
            "\"\u{1f}\"",
            "[1]x",
            "[1]\0",
            "\u{feff}[]",
            "\u{a0}[]",
            "\u{c}[]",
            "// c\n1",
            "[1]//",
        ] {
            assert_unreadable(body);
        }
        assert_unreadable(b"\"\xff\"");
        assert_unreadable(b"\"\xed\xa0\x80\"");
        assert_unreadable(
            "[1]"
                .encode_utf16()
                .flat_map(u16::to_le_bytes)
                .collect::<Vec<_>>(),
        );
    }

    #[test]
    fn half_a_surrogate_pair_is_unreadable() {
        for body in [
            r#""\ud800""#,
            r#""\udc00""#,
            r#""\ud800x""#,
            r#""\ud800\n""#,
            r#""\ud800\u0061""#,
            r#""\ud800\ud800""#,
            r#""\udc00\ud800""#,
            r#""\ud800\ue000""#,
            r#"{"\udfff":1}"#,
        ] {
            assert_unreadable(body);
        }
    }

    #[test]
    fn a_name_that_occurs_twice_is_unreadable_at_any_depth() {
        for body in [
            r#"{"a":1,"a":1}"#,
            r#"{"a":1,"b":2,"a":3}"#,
            r#"{"a":1,"\u0061":1}"#,
            r#"[{"x":[{"a":1,"a":2}]}]"#,
            r#"{"":1,"":1}"#,
        ] {
            assert_unreadable(body);
        }
        value(r#"{"a":{"a":{"a":[{"a":1},{"a":1}]}},"b":1}"#);
    }

    #[test]
    fn nesting_is_read_to_the_limit_and_no_deeper() {
        let nested =
            |open: &str, close: &str, depth| open.repeat(depth) + "1" + &close.repeat(depth);
        value(&nested("[", "]", MAX_DEPTH));
        value(&nested("{\"a\":", "}", MAX_DEPTH));
        assert_unreadable(nested("[", "]", MAX_DEPTH + 1));
        assert_unreadable(nested("{\"a\":", "}", MAX_DEPTH + 1));
        assert_unreadable(nested("[{\"a\":", "}]", MAX_DEPTH / 2 + 1));
    }

    #[test]
    fn a_small_stack_is_deep_enough() {
        let read = || {
            let body = "[{\"a\":".repeat(MAX_DEPTH / 2) + "1" + &"}]".repeat(MAX_DEPTH / 2);
            value(&body)
        };
        let thread = std::thread::Builder::new().stack_size(256 << 10);
        thread.spawn(read).unwrap().join().unwrap();
    }

    // These would not end if any of them took quadratic time or a stack frame per byte.
    #[test]
    fn hostile_documents_are_read_or_refused_in_passing() {
        const MIB: usize = 1 << 20;
        assert_unreadable("[".repeat(2 * MIB));
        assert_unreadable("{\"a\":".repeat(MIB / 3));
        assert_unreadable("[".to_owned() + &"[],".repeat(MIB / 2));
        assert_unreadable("\"".to_owned() + &"\\n".repeat(MIB));
        value(&format!("[{}0]", "0,".repeat(MIB)));
        value(&format!("\"{}\"", "\\u0061".repeat(MIB / 3)));
        value(&format!("{}1", " ".repeat(MIB)));
        let name = "n".repeat(100);
        let members: Vec<_> = (0..20_000)
            .map(|index| format!("\"{name}{:05}\":{{}}", index * 7919 % 20_000))
            .collect();
        let object = members.join(",");
        value(&format!("{{{object}}}"));
        assert_unreadable(format!("{{{object},{}}}", members[77]));
    }

    #[test]
    fn chosen_values_are_found_by_member_and_index() {
        let text = r#"{"a":{"b/c":1,"d~e":2,"":3,"0":4},"l":[10,[20,21]],"01":5,"-":6}"#;
        for (pointer, found) in [
            ("", text),
            ("/a/b~1c", "1"),
            ("/a/d~0e", "2"),
            ("/a/", "3"),
            ("/a/0", "4"),
            ("/l/0", "10"),
            ("/l/1/1", "21"),
            ("/l/1", "[20,21]"),
            ("/01", "5"),
            ("/-", "6"),
        ] {
            assert_eq!(only(text, &[pointer]), only(found, &[""]), "{pointer}");
        }
        let absent = only("{}", &["/x"]);
        for pointer in [
            "/b", "/l/2", "/l/-", "/l/00", "/l/a", "/l/0/0", "/a/b/c", "/01/",
        ] {
            assert_eq!(only(text, &[pointer]), absent, "{pointer}");
        }
    }

    #[test]
    fn an_absent_value_differs_from_null_and_from_its_neighbour() {
        let of = |text| only(text, &["/a", "/b"]);
        let all = [
            of("{}"),
            of(r#"{"a":null}"#),
            of(r#"{"b":null}"#),
            of(r#"{"a":null,"b":null}"#),
            of(r#"{"a":1,"b":2}"#),
            of(r#"{"a":2,"b":1}"#),
            of(r#"{"a":1}"#),
            of(r#"{"b":1}"#),
        ];
        for (index, one) in all.iter().enumerate() {
            assert!(!all[..index].contains(one), "{index}");
        }
    }

    #[test]
    fn elements_keep_their_index_when_others_are_left_out() {
        let of = |text| except(text, &["/1"]);
        assert_eq!(of("[1,2,3]"), of("[1,[],3]"));
        assert_eq!(of("[1]"), of("[1,2]"));
        assert_ne!(of("[1,2,3]"), of("[1,3]"));
        assert_ne!(of("[1,2,3]"), of("[1,2]"));
        // In an object the same token is a member's name.
        assert_eq!(of(r#"{"1":1,"2":2}"#), of(r#"{"2":2}"#));
        assert_ne!(of(r#"{"0":1}"#), of("{}"));
    }

    #[test]
    fn a_pointer_leaves_out_only_what_it_points_to() {
        let of = |text| except(text, &["/a/b"]);
        assert_eq!(
            of(r#"{"a":{"b":1,"c":2}}"#),
            of(r#"{"a":{"c":2,"b":{"x":[]}}}"#)
        );
        assert_eq!(of(r#"{"a":{"b":1}}"#), of(r#"{"a":{}}"#));
        assert_ne!(of(r#"{"a":{"b":1}}"#), of("{}"));
        assert_ne!(of(r#"{"b":1}"#), of("{}"));
        assert_ne!(of(r#"{"x":{"b":1}}"#), of(r#"{"x":{}}"#));
        assert_ne!(of(r#"{"a":["b"]}"#), of(r#"{"a":[]}"#));
        assert_ne!(of(r#"{"a":{"a":{"b":1}}}"#), of(r#"{"a":{"a":{}}}"#));
    }
}
