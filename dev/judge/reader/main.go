// Reads an RDB file by a parser that other people wrote, and prints a line for each key: its database, type, name, time of
// expiry in milliseconds since 1970 (-1: never) and elements. Bytes are in hexadecimal digits, scores in those of a binary64, and what
// has no order is sorted. `make judge-files` compares these lines with what a server says of its keys.
package main

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"math"
	"os"
	"sort"
	"strings"

	"github.com/hdt3213/rdb/core"
	"github.com/hdt3213/rdb/model"
)

func main() {
	if err := read(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func read(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	out := bufio.NewWriter(os.Stdout)
	err = core.NewDecoder(file).Parse(func(object model.RedisObject) bool {
		expires := int64(-1)
		if at := object.GetExpiration(); at != nil {
			expires = at.UnixMilli()
		}
		key := hex.EncodeToString([]byte(object.GetKey()))
		fmt.Fprintln(out, object.GetDBIndex(), object.GetType(), key, expires, strings.Join(elements(object), " "))
		return true
	})
	if err != nil {
		return err
	}
	return out.Flush()
}

func elements(object model.RedisObject) []string {
	switch value := object.(type) {
	case *model.StringObject:
		return all([][]byte{value.Value})
	case *model.ListObject:
		return all(value.Values)
	case *model.SetObject:
		return sorted(all(value.Members))
	case *model.HashObject:
		var found []string
		for field, of := range value.Hash {
			expires, expiring := value.FieldExpirations[field]
			if !expiring || expires == 0 {
				expires = -1
			}
			found = append(found, fmt.Sprintf("%x=%x@%d", field, of, expires))
		}
		return sorted(found)
	case *model.ZSetObject:
		var found []string
		for _, entry := range value.Entries {
			found = append(found, fmt.Sprintf("%x=%016x", entry.Member, math.Float64bits(entry.Score)))
		}
		return sorted(found)
	case *model.StreamObject:
		return stream(value)
	}
	return []string{"unknown"}
}

// The entries, the last ID, and of each group its last ID and which entries await an acknowledgement.
func stream(value *model.StreamObject) []string {
	var found []string
	for _, node := range value.Entries {
		for _, message := range node.Msgs {
			if message.Deleted {
				continue
			}
			var fields []string
			for field, of := range message.Fields {
				fields = append(fields, fmt.Sprintf("%x=%x", field, of))
			}
			found = append(found, id(message.Id)+":"+strings.Join(sorted(fields), ","))
		}
	}
	found = append(found, "last:"+id(value.LastId))
	var groups []string
	for _, group := range value.Groups {
		var pending []string
		for _, entry := range group.Pending {
			pending = append(pending, id(entry.Id))
		}
		groups = append(groups, fmt.Sprintf("group:%x:%s:%s", group.Name, id(group.LastId), strings.Join(pending, ",")))
	}
	return append(found, sorted(groups)...)
}

func id(of *model.StreamId) string {
	return fmt.Sprintf("%d-%d", of.Ms, of.Sequence)
}

func all(values [][]byte) []string {
	found := make([]string, 0, len(values))
	for _, value := range values {
		found = append(found, hex.EncodeToString(value))
	}
	return found
}

func sorted(values []string) []string {
	sort.Strings(values)
	return values
}
