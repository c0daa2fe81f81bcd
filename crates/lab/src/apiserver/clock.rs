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

/// An age in the largest unit of which there are two.
fn human(secs: i64) -> String {
    match secs {
        ..120 => format!("{}s", secs.max(0)),
        120..7_200 => format!("{}m", secs / 60),
        7_200..172_800 => format!("{}h", secs / 3_600),
        _ => format!("{}d", secs / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_grow_coarser() {
        for (secs, shown) in [(-1, "0s"), (119, "119s"), (120, "2m"), (7_200, "2h"), (172_800, "2d")] {
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
