//! Numbers as tables and plots show them.

/// Formats a value with three digits, and a letter for thousands.
pub fn short(value: f64) -> String {
    let (scaled, letter) = match value {
        large if large >= 1e9 => (large / 1e9, " G"),
        large if large >= 1e6 => (large / 1e6, " M"),
        large if large >= 1e4 => (large / 1e3, " k"),
        small => (small, ""),
    };
    match scaled {
        large if large >= 100.0 => format!("{large:.0}{letter}"),
        large if large >= 10.0 => format!("{large:.1}{letter}"),
        small => format!("{small:.2}{letter}"),
    }
}

/// Formats a ratio with three digits.
pub fn short_ratio(ratio: f64) -> String {
    if ratio >= 10.0 { format!("{ratio:.0}") } else { format!("{ratio:.2}") }
}

/// Formats the number at a tick of an axis, without zeros after the point.
pub fn tick(value: f64) -> String {
    let text = short(value);
    let (number, letter) = text.split_once(' ').unwrap_or((&text, ""));
    let number = match number.split_once('.') {
        // Fewer than three digits are not enough for the ticks of a logarithmic axis.
        Some(("0", "00")) if value != 0.0 => return format!("{value}"),
        Some(_) => number.trim_end_matches('0').trim_end_matches('.'),
        None => number,
    };
    format!("{number} {letter}").trim_end().to_owned()
}

/// Formats nanoseconds in the unit that fits, without decimals where they say little.
pub fn duration(nanoseconds: f64) -> String {
    let (value, unit) = match nanoseconds {
        seconds if seconds >= 1e9 => (seconds / 1e9, "s"),
        milliseconds if milliseconds >= 1e6 => (milliseconds / 1e6, "ms"),
        microseconds if microseconds >= 1e3 => (microseconds / 1e3, "us"),
        small => (small, "ns"),
    };
    let digits = if value >= 10.0 || value.fract() == 0.0 { 0 } else { 1 };
    format!("{value:.digits$} {unit}")
}

/// Formats a size: whole binary units where the size is one.
pub fn bytes(bytes: f64) -> String {
    let units = [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit as f64) {
        None => format!("{bytes} B"),
        Some((unit, name)) => {
            let value = bytes / unit as f64;
            let digits = usize::from(value.fract() != 0.0);
            format!("{value:.digits$} {name}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_three_digits_and_sizes_their_unit() {
        let shown = [1.0, 9_999.0, 12_345.0, 1.5e6, 2e9].map(short);
        assert_eq!(shown, ["1.00", "9999", "12.3 k", "1.50 M", "2.00 G"]);
        assert_eq!([0.917, 88.2].map(short_ratio), ["0.92", "88"]);
        assert_eq!(
            [500.0, 1500.0, 1e6, 2.25e9].map(duration),
            ["500 ns", "1.5 us", "1 ms", "2.2 s"]
        );
        assert_eq!([0.0, 0.001, 0.25, 10.0, 2e6].map(tick), ["0", "0.001", "0.25", "10", "2 M"]);
        assert_eq!([64.0, 4096.0, 1.5 * 1048576.0].map(bytes), ["64 B", "4 KiB", "1.5 MiB"]);
    }
}
