//! Pieces of JSON, put into a buffer of bytes without a detour through values.

/// A line of JSON in the making.
#[derive(Default)]
pub(crate) struct Text {
    pub(crate) bytes: Vec<u8>,
    digits: itoa::Buffer,
}

impl Text {
    pub(crate) fn raw(&mut self, text: &str) -> &mut Self {
        self.bytes.extend_from_slice(text.as_bytes());
        self
    }

    pub(crate) fn int(&mut self, value: impl itoa::Integer) -> &mut Self {
        let digits = self.digits.format(value);
        self.bytes.extend_from_slice(digits.as_bytes());
        self
    }

    /// Nanoseconds as microseconds with three decimals.
    pub(crate) fn us(&mut self, ns: u64) -> &mut Self {
        self.int(ns / 1000);
        let rest = ns % 1000;
        let digit = |place: u64| b'0' + (rest / place % 10) as u8;
        self.bytes.extend_from_slice(&[b'.', digit(100), digit(10), digit(1)]);
        self
    }

    /// A number, which JSON has to be able to write.
    pub(crate) fn float(&mut self, value: f64) -> &mut Self {
        if value.is_finite() { self.raw(&format!("{value}")) } else { self.raw("null") }
    }

    /// A string in quotes.
    pub(crate) fn string(&mut self, text: &str) -> &mut Self {
        self.bytes.push(b'"');
        for byte in text.bytes() {
            match byte {
                b'"' | b'\\' => self.bytes.extend_from_slice(&[b'\\', byte]),
                0..=0x1f => self.bytes.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
                _ => self.bytes.push(byte),
            }
        }
        self.bytes.push(b'"');
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_by_others() {
        let mut text = Text::default();
        text.raw("[").us(1_234_567_089).raw(",").us(7).raw(",").int(-3).raw(",").float(0.5);
        text.raw(",").float(f64::NAN).raw(",").string("a \"b\"\\\n\u{e9}").raw("]");
        let value: serde_json::Value = serde_json::from_slice(&text.bytes).unwrap();
        let expected = serde_json::json!([1234567.089, 0.007, -3, 0.5, null, "a \"b\"\\\n\u{e9}"]);
        assert_eq!(value, expected);
        assert!(text.bytes.starts_with(b"[1234567.089,0.007,"));
    }
}
