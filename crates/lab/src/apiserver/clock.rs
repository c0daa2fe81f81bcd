//! Time as Kubernetes writes it: RFC 3339 in whole seconds, and ages as `kubectl` shows them.

use jiff::Timestamp;

/// Now, in the precision of `metadata.creationTimestamp`.
pub(super) fn now() -> String {
    format(Timestamp::now())
}

fn format(at: Timestamp) -> String {
    Timestamp::from_second(at.as_second()).unwrap_or(at).to_string()
}

/// Seconds from `stamp` to `now`; none where the stamp cannot be read.
pub(super) fn age_secs(stamp: &str, now: Timestamp) -> Option<i64> {
    let at: Timestamp = stamp.parse().ok()?;
    Some(now.as_second() - at.as_second())
}

/// The age column: `<unknown>` without a stamp.
pub(super) fn age(stamp: &str, now: Timestamp) -> String {
    age_secs(stamp, now).map_or_else(|| "<unknown>".to_owned(), human)
}

/// An age in at most two units, the coarser the older.
pub(super) fn human(secs: i64) -> String {
    const MINUTE: i64 = 60;
    const HOUR: i64 = 60 * MINUTE;
    const DAY: i64 = 24 * HOUR;
    const YEAR: i64 = 365 * DAY;
    let two = |unit: i64, large: &str, part: i64, small: &str| match (secs % unit) / part {
        0 => format!("{}{large}", secs / unit),
        rest => format!("{}{large}{rest}{small}", secs / unit),
    };
    match secs {
        ..-1 => "<invalid>".to_owned(),
        -1..0 => "0s".to_owned(),
        0..120 => format!("{secs}s"),
        120..600 => two(MINUTE, "m", 1, "s"),
        600..10_800 => format!("{}m", secs / MINUTE),
        10_800..28_800 => two(HOUR, "h", MINUTE, "m"),
        28_800..172_800 => format!("{}h", secs / HOUR),
        172_800..691_200 => two(DAY, "d", HOUR, "h"),
        691_200..63_072_000 => format!("{}d", secs / DAY),
        63_072_000..252_288_000 => two(YEAR, "y", DAY, "d"),
        _ => format!("{}y", secs / YEAR),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_grow_coarser() {
        for (secs, shown) in [
            (-5, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (185, "3m5s"),
            (3_600, "60m"),
            (3 * 3_600 + 60, "3h1m"),
            (8 * 3_600, "8h"),
            (3 * 86_400 + 3_600, "3d1h"),
            (100 * 86_400, "100d"),
            (3 * 365 * 86_400, "3y"),
        ] {
            assert_eq!(human(secs), shown, "{secs} seconds");
        }
    }

    #[test]
    fn stamps_have_whole_seconds() {
        let at: Timestamp = "2024-02-03T04:05:06.789Z".parse().expect("a valid stamp");
        assert_eq!(format(at), "2024-02-03T04:05:06Z");
        assert_eq!(age_secs("2024-02-03T04:05:00Z", at), Some(6));
        assert_eq!(age("", at), "<unknown>");
    }
}
