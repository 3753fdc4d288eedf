//! Writes JSON directly into a buffer of bytes, without building values first.

/// A buffer of JSON text.
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

    /// Writes nanoseconds as microseconds with three decimals.
    pub(crate) fn us(&mut self, ns: u64) -> &mut Self {
        self.int(ns / 1000);
        let rest = ns % 1000;
        let digit = |place: u64| b'0' + (rest / place % 10) as u8;
        self.bytes.extend_from_slice(&[b'.', digit(100), digit(10), digit(1)]);
        self
    }

    /// Writes nanoseconds as microseconds, such that readers who compute in floating point get the same
    /// nanoseconds. Three decimals are written if they are enough for that.
    ///
    /// Perfetto multiplies the number by 1000 and drops the fraction. 1.003 becomes 1002.999... and then
    /// 1002, and the event could then reach beyond the end of the event around it. In such a case, the next
    /// larger floating-point numbers are tried until the result is right.
    pub(crate) fn us_for_floats(&mut self, ns: i64) -> &mut Self {
        let mut us = ns as f64 / 1000.0;
        if (us * 1000.0) as i64 == ns {
            return self.raw(if ns < 0 { "-" } else { "" }).us(ns.unsigned_abs());
        }
        while ((us * 1000.0) as i64) < ns {
            us = us.next_up();
        }
        self.raw(&format!("{us}"))
    }

    /// Writes a number, or `null` if JSON cannot express it.
    pub(crate) fn float(&mut self, value: f64) -> &mut Self {
        if value.is_finite() { self.raw(&format!("{value}")) } else { self.raw("null") }
    }

    /// Writes a string in quotes.
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
    use crate::json::micros_ns;

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

    #[test]
    fn every_reader_gets_the_same_nanoseconds() {
        let mut corrected = 0;
        let values = (0..2_000_000).chain((0..1000).map(|i| 86_400_000_000_000 + 7_919 * i));
        for ns in values {
            let mut out = Text::default();
            out.us_for_floats(ns);
            let text = std::str::from_utf8(&out.bytes).unwrap();
            let us: f64 = text.parse().unwrap();
            assert_eq!((us * 1000.0) as i64, ns, "{text}");
            assert_eq!(micros_ns(&out.bytes), Some(ns), "{text}");
            corrected += usize::from(text.split('.').nth(1).unwrap().len() > 3);
        }
        assert!(corrected > 0);
    }
}
