//! Sizes in bytes as people write them: `64M`, `512MiB`, `1GiB`, `4096`.
//!
//! Used by the program for its options and wherever a size is printed. All units are binary: `M`,
//! `MB` and `MiB` are the same here, as in most tools.

/// Parses a size; a unit may follow the number, in upper or lower case.
///
/// # Errors
/// A message that names the mistake and the valid forms.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let digits_end = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let (digits, unit) = trimmed.split_at(digits_end);
    let number: u64 =
        digits.parse().map_err(|_| format!("`{text}` is no size: write 4096, 64M or 1GiB"))?;
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        other => return Err(format!("`{other}` is no unit of bytes: use K, M, G or T")),
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("`{text}` is more than 2^64 bytes"))
}

/// Writes a size with the largest unit that leaves a number of at least one.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (unit, shift) in UNITS {
        if bytes >> shift == 0 {
            continue;
        }
        let scaled = bytes as f64 / (1u64 << shift) as f64;
        let decimals = if bytes.trailing_zeros() >= shift { 0 } else { 1 };
        return format!("{scaled:.decimals$} {unit}");
    }
    format!("{bytes} bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_every_unit_refuses_what_is_no_size_and_formats_shortly() {
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert_eq!(parse_bytes("512MiB"), Ok(512 << 20));
        assert_eq!(parse_bytes(" 2 t "), Ok(2 << 40));
        for bad in ["", "M", "-1", "1.5G", "12Q", "99999999999999999999", "16777216T"] {
            assert!(parse_bytes(bad).is_err(), "{bad:?} was taken for a size");
        }
        assert_eq!(format_bytes(0), "0 bytes");
        assert_eq!(format_bytes(1023), "1023 bytes");
        assert_eq!(format_bytes(64 << 20), "64 MiB");
        assert_eq!(format_bytes((1 << 30) + (1 << 29)), "1.5 GiB");
        assert_eq!(format_bytes(1536 << 30), "1.5 TiB");
    }
}
