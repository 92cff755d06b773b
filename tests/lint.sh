#!/usr/bin/env bash
# Conventions that a compiler does not check: include layering, banned functions, lengths, format.
# Speaks TAP, like every runner here.
set -uo pipefail
cd "$(dirname "$0")/.."

count=0 failed=0
check() { # NAME TEXT: passes when TEXT is empty
    count=$((count + 1))
    if [ -z "$2" ]; then
        echo "ok $count - $1"
    else
        failed=1
        echo "not ok $count - $1"
        sed 's/^/# /' <<<"$2" | head -n 30
    fi
}
sources() { git ls-files "$@" | grep -E '\.[ch]$' | grep -v '^tests/fuzz/corpus/'; }
includes() { # FOLDER FORBIDDEN...: include lines in FOLDER that reach into a forbidden folder
    local folder=$1 pattern
    shift
    pattern=$(IFS='|' && echo "$*")
    sources "$folder" | xargs -r grep -nE "#include \"($pattern)/" /dev/null
}

check "base includes no other folder" "$(includes base proto pd_buffers kernels prefill decode router)"
check "proto includes base only" "$(includes proto pd_buffers kernels prefill decode router)"
check "kernels include base only" "$(includes kernels proto pd_buffers prefill decode router)"
check "pd_buffers include base and proto only" "$(includes pd_buffers kernels prefill decode router)"
check "prefill does not include decode or router" "$(includes prefill decode router)"
check "decode does not include prefill or router" "$(includes decode prefill router)"
check "router includes base and proto only" "$(includes router pd_buffers kernels prefill decode)"
check "*_internal.h stays in its folder" "$(sources . | while read -r file; do
    grep -oE '#include "[a-z_/]+_internal\.h"' "$file" | cut -d'"' -f2 | while read -r header; do
        case $file in tests/*) ;; *) [ "$(dirname "$header")" = "$(dirname "$file")" ] ||
            [[ $(dirname "$file") == $(dirname "$header")/* ]] || echo "$file includes $header" ;; esac
    done
done)"
check "protobuf-c only in the codec" "$(sources base pd_buffers kernels prefill decode router |
    xargs grep -nE 'protobuf-c|\.pb-c\.h' /dev/null)"
check "no banned function" "$(sources base proto pd_buffers kernels prefill decode router |
    xargs grep -nE '\b(sprintf|strcpy|strcat|strtok|atoi|atol|alloca|gets)\(' /dev/null)"
check "allocation goes through base/mem.h" "$(sources proto pd_buffers kernels prefill decode router |
    xargs grep -nE '(^|[^a-z_])(malloc|calloc|realloc|free|strdup)\(' /dev/null)"
check "tests do not sleep" "$(git ls-files tests | grep -E '\.(c|py|sh)$' | grep -v 'tests/lint.sh' |
    xargs grep -nE '\b(usleep|nanosleep|sleep)\(|time\.sleep' /dev/null)"
check "tests do not include sources" "$(sources tests | xargs grep -nE '#include "[^"]+\.c"' /dev/null)"
check "no file above 700 lines" "$(git ls-files '*.[ch]' | xargs wc -l |
    awk '$2 != "total" && $1 > 700 {print $2 ": " $1 " lines"}')"
check "no function above 70 lines" "$(sources base proto pd_buffers kernels prefill decode router | xargs awk '
    FNR == 1 {inside = 0; waived = 0}
    /lint: long function/ {waived = 1}
    /^[a-zA-Z_].*\)[ \t]*\{$/ || (/^    .*\) \{$/ && !inside && open_parameters) {
        inside = 1; start = FNR; name = $0}
    {open_parameters = (/^[a-zA-Z_].*[,(]$/ || (open_parameters && /,$/))}
    /^\}/ {if (inside && FNR - start > 70 && !waived)
               print FILENAME ":" start ": " FNR - start " lines: " name
           inside = 0; if (FNR > start) waived = 0}')"
check "no work left without an issue number" "$(sources . | grep -v '^tests/lint' |
    xargs grep -nE '\b(TODO|FIXME|XXX|HACK)\b' /dev/null | grep -vE '#[0-9]+')"
if command -v clang-format >/dev/null; then
    check "clang-format" "$(sources . | xargs clang-format --dry-run 2>&1 | grep -E 'warning|error' | head)"
elif [ -n "${CI:-}" ]; then
    check "clang-format" "clang-format is not installed"
else
    count=$((count + 1)) && echo "ok $count - clang-format # SKIP not installed"
fi
echo "1..$count"
exit $failed
