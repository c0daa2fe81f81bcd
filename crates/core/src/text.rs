//! Bounded quotes of texts that users write, and names.

use std::borrow::Cow;
use std::net::IpAddr;

/// At most `most` bytes of a foreign text, cut between characters, with its length if it is cut.
pub fn quoted(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return Cow::Borrowed(text);
    }
    Cow::Owned(format!("{}... ({} bytes)", &text[..text.floor_char_boundary(most)], text.len()))
}

/// At most so many texts that fit into so many bytes, then the number of the others.
pub fn listed(texts: &[String], separator: &str, (most, bytes): (usize, usize)) -> String {
    let mut all = String::new();
    for (place, text) in texts.iter().enumerate() {
        if place == most || all.len() + separator.len() + text.len() > bytes {
            let more = format!("and {} more", texts.len() - place);
            return if all.is_empty() { more } else { format!("{all}{separator}{more}") };
        }
        if place > 0 {
            all.push_str(separator);
        }
        all.push_str(text);
    }
    all
}

/// A name of an object for an address.
pub fn named_by_address(prefix: &str, address: IpAddr) -> String {
    match address {
        IpAddr::V4(address) => format!("{prefix}-{address}"),
        // Two colons could begin or end a name.
        IpAddr::V6(address) => format!("{prefix}-{}", address.segments().map(|part| format!("{part:x}")).join("-")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_between_characters_and_says_how_long_it_is() {
        assert_eq!(quoted("172.18.0.100", 64), "172.18.0.100");
        assert_eq!(quoted("ééé", 3), "é... (6 bytes)");
        assert_eq!(quoted(&"x".repeat(12_000), 4), "xxxx... (12000 bytes)");
    }

    #[test]
    fn a_long_list_ends_with_how_many_more_there_are() {
        let texts: Vec<String> = ["aa", "bb", "cc"].map(str::to_owned).into();
        assert_eq!(listed(&texts, "; ", (3, 100)), "aa; bb; cc");
        assert_eq!(listed(&texts, "; ", (2, 100)), "aa; bb; and 1 more");
        assert_eq!(listed(&texts, "; ", (3, 5)), "aa; and 2 more");
        assert_eq!(listed(&texts, "; ", (3, 1)), "and 3 more");
        assert_eq!(listed(&[], "; ", (3, 1)), "");
    }
}
