//! Nanoseconds as microseconds, so that readers who compute in floating point get the same nanoseconds.

use crate::kineto::text::Text;

/// Writes nanoseconds as microseconds, with three decimals where that is enough.
///
/// Perfetto multiplies what it reads by 1000 and drops what lies behind the point: 1.003 becomes 1002.999...,
/// hence 1002. An event would then reach over the end of the one around it. Where that happens, the next
/// larger numbers are written until it does not.
pub(super) fn micros(out: &mut Text, ns: i64) {
    let mut us = ns as f64 / 1000.0;
    if (us * 1000.0) as i64 == ns {
        let sign = if ns < 0 { "-" } else { "" };
        out.raw(sign).us(ns.unsigned_abs());
        return;
    }
    while ((us * 1000.0) as i64) < ns {
        us = us.next_up();
    }
    out.raw(&format!("{us}"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::micros_ns;

    #[test]
    fn every_reader_gets_the_same_nanoseconds() {
        let mut corrected = 0;
        let values = (0..2_000_000).chain((0..1000).map(|i| 86_400_000_000_000 + 7_919 * i));
        for ns in values {
            let mut out = Text::default();
            micros(&mut out, ns);
            let text = std::str::from_utf8(&out.bytes).unwrap();
            let us: f64 = text.parse().unwrap();
            assert_eq!((us * 1000.0) as i64, ns, "{text}");
            assert_eq!(micros_ns(&out.bytes), Some(ns), "{text}");
            corrected += usize::from(text.split('.').nth(1).unwrap().len() > 3);
        }
        assert!(corrected > 0);
    }
}
