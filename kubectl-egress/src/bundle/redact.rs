//! What must not leave the cluster: credentials in objects, in arguments and in logs. Pure.
//!
//! Secrets are never requested. Credentials elsewhere are found by the name of the variable, field or flag that holds them, and by
//! the shape of the text: keys in PEM, kubeconfigs, bearer tokens, users in URLs. Text is read line by line; a line of JSON is
//! redacted as an object is. What is redacted without need is no harm.

use serde_json::{Map, Value};

pub(crate) const REDACTED: &str = "REDACTED";

/// Parts of names that hold credentials.
const CREDENTIALS: [&str; 11] = [
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "token",
    "secret",
    "apikey",
    "privatekey",
    "accesskey",
    "credential",
    "authorization",
];
/// Ends of names of references to them, and of settings about them.
const REFERENCES: [&str; 6] = ["name", "namespace", "ref", "file", "path", "seconds"];
/// Text that contains one of these is a credential as a whole.
const WHOLE: [&str; 3] = [PRIVATE_KEY, "client-key-data", "client-certificate-data"];
const PRIVATE_KEY: &str = "PRIVATE KEY-----";
/// The line by which a kubeconfig is known.
const KUBECONFIG: &str = "kind: Config";
/// Fields that repeat an object, or hold bytes that are not read here.
const DROPPED: [&str; 6] = [
    "managedFields",
    "kubectl.kubernetes.io/last-applied-configuration",
    "kapp.k14s.io/original",
    "objectset.rio.cattle.io/applied",
    "images",
    "binaryData",
];
const QUOTES: [char; 2] = ['"', '\''];

/// Whether a variable, field or flag of this name holds a credential.
fn is_credential(name: &str) -> bool {
    let name = simple(name);
    CREDENTIALS.iter().any(|part| name.contains(part)) && !REFERENCES.iter().any(|end| name.ends_with(end))
}

fn simple(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_lowercase()
}

/// A flag whose value is the next argument.
fn is_bare_flag(argument: &str) -> bool {
    argument.starts_with('-') && !argument.contains(['=', ' ']) && is_credential(argument)
}

/// Redacts an object in place, and removes [`DROPPED`].
pub(crate) fn object(value: &mut Value) {
    match value {
        Value::Object(fields) => map(fields),
        Value::Array(items) => array(items),
        Value::String(string) => *string = text(string),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn map(fields: &mut Map<String, Value>) {
    fields.retain(|name, _| !DROPPED.contains(&name.as_str()));
    // A variable of a container.
    if fields.get("name").and_then(Value::as_str).is_some_and(is_credential)
        && let Some(value) = fields.get_mut("value")
    {
        *value = REDACTED.into();
    }
    for (name, value) in fields.iter_mut() {
        if is_credential(name) { credential(value) } else { object(value) }
    }
}

/// Arguments of a container, among others.
fn array(items: &mut [Value]) {
    let mut is_value = false;
    for item in items {
        let is_flag = item.as_str().is_some_and(is_bare_flag);
        if is_value {
            credential(item)
        } else {
            object(item)
        }
        is_value = is_flag;
    }
}

/// What a name of a credential has. An object may be a reference, as `secret` of a volume, so its fields decide; a switch is none.
fn credential(value: &mut Value) {
    match value {
        Value::String(_) | Value::Number(_) => *value = REDACTED.into(),
        Value::Array(items) => items.iter_mut().for_each(credential),
        Value::Object(fields) => map(fields),
        Value::Null | Value::Bool(_) => {}
    }
}

/// Redacts a text line by line.
pub(crate) fn text(text: &str) -> String {
    if WHOLE.iter().any(|part| text.contains(part)) || text.lines().any(|line| line.trim() == KUBECONFIG) {
        return REDACTED.to_owned();
    }
    let by_line = || text.split('\n').map(line).collect::<Vec<_>>().join("\n");
    json(text).unwrap_or_else(by_line)
}

/// A log, in which a key must not take other lines along than its own.
pub(crate) fn log(log: &str) -> String {
    let mut is_in_key = false;
    let lines = log.split('\n').map(|one| {
        let was_in_key = is_in_key;
        if one.contains(PRIVATE_KEY) {
            // The last of both decides, if a line has several.
            is_in_key = one.rfind("-----BEGIN") > one.rfind("-----END");
        }
        let is_hidden = was_in_key || WHOLE.iter().any(|part| one.contains(part));
        if is_hidden { REDACTED.to_owned() } else { line(one) }
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// One line: JSON by the rules of objects, and any other text by the names in it.
fn line(line: &str) -> String {
    json(line).unwrap_or_else(|| words(&users(line)))
}

/// A document of JSON by the rules of objects, perhaps with a timestamp before it. `None` if the text is something else.
fn json(text: &str) -> Option<String> {
    let (before, document) = text.split_at(text.find(['{', '['])?);
    let is_timestamp = before.starts_with(|first: char| first.is_ascii_digit()) && !before.trim().contains(' ');
    if !before.trim().is_empty() && !is_timestamp {
        return None;
    }
    let read: Value = serde_json::from_str(document).ok()?;
    let mut redacted = read.clone();
    object(&mut redacted);
    // Without credentials the order of the fields stays.
    Some(if redacted == read { text.to_owned() } else { format!("{before}{redacted}") })
}

/// Redacts users and passwords in all URLs, as `https://user:X@host`.
fn users(line: &str) -> String {
    let mut parts = line.split("://");
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|one: char| one.is_whitespace() || "/?#\"'".contains(one)).unwrap_or(part.len());
        let host = part.get(..end).and_then(|authority| authority.rfind('@'));
        kept.push_str("://");
        kept.extend(host.map(|_| REDACTED));
        kept.push_str(part.get(host.unwrap_or_default()..).unwrap_or_default());
    }
    kept
}

/// Redacts what follows names, as in `--token X`, `token=X`, `password : "X Y"`, `?token=X`, `Bearer X` and `Authorization: X Y`.
fn words(line: &str) -> String {
    let (mut kept, mut rest) = (String::new(), line);
    while !rest.is_empty() {
        let is_of_name = |one: char| one.is_alphanumeric() || "-_.".contains(one);
        let name = rest.split(|one| !is_of_name(one)).next().unwrap_or_default();
        let after = rest.strip_prefix(name).unwrap_or_default();
        kept.push_str(name);
        // Of the rest, what is kept before the value.
        let separator = if name.is_empty() { None } else { separator(name, after) };
        let Some((between, value)) = separator.map(|length| after.split_at(length)) else {
            let next = after.chars().next();
            kept.extend(next);
            rest = after.get(next.map_or(0, char::len_utf8)..).unwrap_or_default();
            continue;
        };
        kept.push_str(between);
        let is_list = value.starts_with(['{', '[']);
        let end = match between.chars().next_back().filter(|last| QUOTES.contains(last)) {
            _ if is_list || simple(name).ends_with("authorization") => None,
            Some(quote) => closing(value, quote),
            None => value.find(char::is_whitespace),
        };
        let end = end.unwrap_or(value.len());
        if end > 0 {
            kept.push_str(REDACTED);
        }
        rest = value.get(end..).unwrap_or_default();
    }
    kept
}

/// Where a quoted value ends.
fn closing(value: &str, quote: char) -> Option<usize> {
    let mut is_escaped = false;
    let end = value.char_indices().find(|(_, one)| {
        let ends = *one == quote && !is_escaped;
        is_escaped = *one == '\\' && !is_escaped;
        ends
    });
    end.map(|(index, _)| index)
}

/// What is between a name and its credential, if it has one: bytes of the text after the name.
fn separator(name: &str, after: &str) -> Option<usize> {
    let is_bearer = name.eq_ignore_ascii_case("bearer");
    if !is_bearer && !is_credential(name) {
        return None;
    }
    let closed = after.trim_start_matches(|one| QUOTES.contains(&one) || one == '\\').trim_start();
    let value = match closed.strip_prefix([':', '=']) {
        Some(value) => value.trim_start(),
        // `--token X`, and `"--token", "X"` of a list.
        None if is_bearer || is_bare_flag(name) => closed.strip_prefix(',').unwrap_or(closed).trim_start(),
        None => return None,
    };
    // JSON in a string of JSON has a backslash before its quotes.
    let value = value.trim_start_matches('\\').strip_prefix(QUOTES).unwrap_or(value);
    Some(after.len() - value.len()).filter(|length| *length > 0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn variables_fields_and_arguments_with_credentials_are_redacted() {
        let mut pod = json!({
            "metadata": {
                "name": "agent", "managedFields": [1],
                "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "kept": "yes"},
            },
            "spec": {
                "automountServiceAccountToken": true,
                "containers": [{
                    "env": [
                        {"name": "DB_PASSWORD", "value": "hunter2"},
                        {"name": "EGRESS_AGENT_NODE_NAME", "value": "n1"},
                        {"name": "API_TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                    ],
                    "args": ["run", "--token=hunter2", "--proxy=http://me:hunter2@proxy:3128", "--health-key-file=/x"],
                }],
                "volumes": [{"name": "tls", "secret": {"secretName": "egress-agent-healthcheck-tls"}}],
            },
            "data": {"accessKey": "hunter2", "agent.conf": "[default]\nmtu=1400"},
        });
        object(&mut pod);
        let text = pod.to_string();
        assert!(!text.contains("hunter2"), "{text}");
        assert!(!text.contains("managedFields") && !text.contains("last-applied"), "{text}");
        for kept in [
            "n1",
            "egress-agent-healthcheck-tls",
            "secretKeyRef",
            "mtu=1400",
            "--health-key-file=/x",
            "proxy:3128",
            "kept",
        ] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
        assert_eq!(pod["spec"]["automountServiceAccountToken"], true);
    }

    #[test]
    fn kubeconfigs_and_keys_are_redacted_as_a_whole() {
        for secret in [
            "apiVersion: v1\nkind: Config\nusers:\n- user:\n    password: x",
            "users:\n- user:\n    client-key-data: aGVsbG8=",
            "-----BEGIN EC PRIVATE KEY-----\nMHcCAQ\n-----END EC PRIVATE KEY-----",
        ] {
            assert_eq!(text(secret), REDACTED);
        }
        assert_eq!(text("-----BEGIN CERTIFICATE-----\nMII"), "-----BEGIN CERTIFICATE-----\nMII");
    }

    #[test]
    fn a_log_loses_its_credentials_and_no_other_line() {
        let said = "first\nAuthorization: Bearer abc.def\npassword: hunter2 and more\nkey client-key-data: x\nlast a=b";
        let expected = "first\nAuthorization: REDACTED\npassword: REDACTED and more\nREDACTED\nlast a=b";
        assert_eq!(log(said), expected);
    }

    #[test]
    fn lists_numbers_and_copies_of_objects_are_redacted_and_references_stay() {
        let mut given = json!({
            "metadata": {"annotations": {"kapp.k14s.io/original": "hunter2", "objectset.rio.cattle.io/applied": "hunter2"}},
            "args": ["--token", "hunter2", "--verbose", "kept", "-password", "hunter2"],
            "pin_token": 8_675_309,
            "passwords": ["hunter2", 8_675_309, {"secretName": "kept"}],
            "DB_PASSPHRASE": "hunter2",
            "pwd": "hunter2",
            "tokenFile": "/kept",
            "tokenExpirationSeconds": 3607,
            "binaryData": {"x": "hunter2"},
        });
        object(&mut given);
        let expected = json!({
            "metadata": {"annotations": {}},
            "args": ["--token", REDACTED, "--verbose", "kept", "-password", REDACTED],
            "pin_token": REDACTED,
            "passwords": [REDACTED, REDACTED, {"secretName": "kept"}],
            "DB_PASSPHRASE": REDACTED,
            "pwd": REDACTED,
            "tokenFile": "/kept",
            "tokenExpirationSeconds": 3607,
        });
        assert_eq!(given, expected);
    }

    #[test]
    fn lines_of_json_are_redacted_as_objects() {
        for (said, expected) in [
            (r#"{"token":"hunter2","level":"info"}"#, r#"{"level":"info","token":"REDACTED"}"#),
            (
                r#"2026-01-01T00:00:00Z {"authorization":"Bearer hunter2"}"#,
                r#"2026-01-01T00:00:00Z {"authorization":"REDACTED"}"#,
            ),
            (r#"{"a":{"message":"with token=hunter2"}}"#, r#"{"a":{"message":"with token=REDACTED"}}"#),
            (r#"["--token","hunter2"]"#, r#"["--token","REDACTED"]"#),
            // Without credentials the order stays.
            (r#"{"level": "info", "a": 1}"#, r#"{"level": "info", "a": 1}"#),
            // Cut JSON is text.
            (r#"{"token":"hunter2","le"#, r#"{"token":"REDACTED","le"#),
            (r#"said {"token": "two words"} at last"#, r#"said {"token": "REDACTED"} at last"#),
            (r#"args: ["--token", "hunter2"]"#, r#"args: ["--token", "REDACTED"]"#),
        ] {
            assert_eq!(log(said), expected);
            assert_eq!(text(said), expected);
        }
    }

    #[test]
    fn credentials_in_text_are_found_by_their_names() {
        for (said, expected) in [
            ("Authorization: Basic hunter2", "Authorization: REDACTED"),
            ("proxy-authorization=Digest a, hunter2", "proxy-authorization=REDACTED"),
            ("sent  Bearer  hunter2 there", "sent  Bearer  REDACTED there"),
            ("password:  hunter2 kept", "password:  REDACTED kept"),
            ("password\t=\thunter2\tkept", "password\t=\tREDACTED\tkept"),
            ("password = hunter2", "password = REDACTED"),
            ("password:hunter2", "password:REDACTED"),
            ("passphrase='hunter2 hunter2' kept", "passphrase='REDACTED' kept"),
            ("run --token  hunter2 --token-file /kept", "run --token  REDACTED --token-file /kept"),
            ("run --token\thunter2", "run --token\tREDACTED"),
            ("at https://a/?a=b&token=hunter2", "at https://a/?a=b&token=REDACTED"),
            ("http://a:hunter2@b,http://c:hunter2@d/e@f", "http://REDACTED@b,http://REDACTED@d/e@f"),
            ("https://hunter2@b", "https://REDACTED@b"),
            ("no token, a secretRef: kept, ü=1", "no token, a secretRef: kept, ü=1"),
            ("password:", "password:"),
            (r#"password="hunter2\"hunter2 x" kept"#, r#"password="REDACTED" kept"#),
            (r#"said {\"token\":\"hunter2 x\"}"#, r#"said {\"token\":\"REDACTED"#),
            (r#"token: ["hunter2", "x"]"#, "token: REDACTED"),
        ] {
            assert_eq!(text(said), expected);
            assert_eq!(log(said), expected);
        }
    }

    #[test]
    fn a_text_that_is_json_is_redacted_as_an_object() {
        let said = "{\n  \"args\": [\n    \"--token\",\n    \"hunter2\"\n  ]\n}\n";
        assert_eq!(text(said), r#"{"args":["--token","REDACTED"]}"#);
    }

    /// Each line of a log has a timestamp.
    #[test]
    fn a_key_in_a_log_is_redacted_over_its_lines() {
        let key = "t -----BEGIN EC PRIVATE KEY-----\nt hunter2\nt -----END EC PRIVATE KEY-----";
        let said = format!("t first\n{key}\nt between\n{key}\nt last");
        let three = "REDACTED\nREDACTED\nREDACTED";
        assert_eq!(log(&said), format!("t first\n{three}\nt between\n{three}\nt last"));
        let on_one_line = r"-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----";
        assert_eq!(log(&format!("{on_one_line}\nlast")), "REDACTED\nlast");
    }
}
