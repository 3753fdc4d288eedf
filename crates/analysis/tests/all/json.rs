//! The pull parser by itself.

use paceline_analysis::json::{Fault, JsonError, MAX_DEPTH, MAX_TOKEN_BYTES, Pull, Value, lossy};

/// All values of an array of scalars and structures, as text.
fn items(json: &str, window: usize) -> Result<Vec<String>, JsonError> {
    let mut pull = Pull::with_window(json.as_bytes(), window);
    let mut items = Vec::new();
    pull.begin_array()?;
    while pull.next_item()? {
        items.push(match pull.value()? {
            Value::Str(text) => format!("string {}", lossy(text)),
            Value::Num(text) => format!("number {}", lossy(text)),
            other => format!("{other:?}"),
        });
    }
    pull.end()?;
    Ok(items)
}

#[test]
fn values_of_every_kind() {
    let json = "[ \"a\" ,\"\",\"\\u0041\\n\", 1,-0.5e+3 , true,false,null,NaN,Infinity,-Infinity, \
                {\"a\":[\"]\",{}]},[ ],\t[[\"\\\"\"]]\r\n]";
    let expected = [
        "string a",
        "string ",
        "string A\n",
        "number 1",
        "number -0.5e+3",
        "Bool(true)",
        "Bool(false)",
        "Null",
        "NonFinite",
        "NonFinite",
        "NonFinite",
        "Nested",
        "Nested",
        "Nested",
    ];
    for window in [1, 2, 3, 5, 8, 13, 4096] {
        assert_eq!(items(json, window).expect("it is well formed"), expected, "{window}");
    }
}

#[test]
fn what_is_skipped_is_not_kept() {
    let mut pull = Pull::with_window(&b"{\"a\": {\"b\": [1, 2]}, \"c\" : 7}  "[..], 4);
    pull.begin_object().expect("an object");
    assert_eq!(pull.next_key().expect("a key"), Some(&b"a"[..]));
    assert!(pull.at_object().expect("a value") && !pull.at_array().expect("a value"));
    pull.skip().expect("well formed");
    assert_eq!(pull.offset(), 19);
    assert_eq!(pull.next_key().expect("a key"), Some(&b"c"[..]));
    assert_eq!(pull.value().expect("a value"), Value::Num(b"7"));
    assert_eq!(pull.next_key().expect("the end"), None);
    pull.end().expect("white space");
}

#[test]
fn depth_has_a_limit_whether_taken_or_skipped() {
    let depth = MAX_DEPTH as usize;
    let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    Pull::new(nested(depth).as_bytes()).skip().expect("as deep as may be");
    let open = "[".repeat(depth + 1);
    let mut steps = Pull::new(open.as_bytes());
    for _ in 0..depth {
        steps.begin_array().expect("as deep as may be");
        assert!(steps.next_item().expect("an item"));
    }
    let taken = steps.begin_array().expect_err("too deep");
    let skipped = Pull::new(nested(depth + 1).as_bytes()).skip().expect_err("too deep");
    for err in [taken, skipped] {
        assert!(matches!(err.fault, Fault::TooDeep), "{err}");
        assert_eq!(err.at, u64::from(MAX_DEPTH));
    }
}

#[test]
fn a_single_value_has_a_limit_only_if_it_is_asked_for() {
    let text = format!("[\"{}\"]", "a".repeat(MAX_TOKEN_BYTES + (1 << 20)));
    let escaped = format!("[\"\\n{}\"]", "a".repeat(MAX_TOKEN_BYTES + (1 << 20)));
    let digits = format!("[{}]", "1".repeat(MAX_TOKEN_BYTES + (1 << 20)));
    for json in [&text, &escaped, &digits] {
        // Only the count: the items themselves would make a failure's message very long.
        let err = items(json, 1 << 16).map(|items| items.len()).expect_err("too long");
        assert!(matches!(err.fault, Fault::TooLong), "{err}");
    }
    Pull::new(text.as_bytes()).skip().expect("nobody asks for it");
    Pull::new(escaped.as_bytes()).skip().expect("nobody asks for it");
}
