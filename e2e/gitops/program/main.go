// Says how kstatus reads objects: one as JSON in, one line of JSON with its status and a message out.
package main

import (
	"encoding/json"
	"errors"
	"io"
	"log"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func main() {
	log.SetFlags(0)
	objects, answers := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var text json.RawMessage
		if err := objects.Decode(&text); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			log.Fatal(err)
		}
		// By its own reader, which keeps whole numbers whole.
		var object unstructured.Unstructured
		if err := object.UnmarshalJSON(text); err != nil {
			log.Fatal(err)
		}
		result, err := status.Compute(&object)
		if err != nil {
			log.Fatal(err)
		}
		if err := answers.Encode(map[string]string{"status": string(result.Status), "message": result.Message}); err != nil {
			log.Fatal(err)
		}
	}
}
